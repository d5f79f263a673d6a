"""Compiled calls that hold their weights and need no Dynamo guards, for adaptors that know what changes between calls.

``capture`` compiles a function for an example call, and returns a ``BoundCall`` (``call``). ``store`` keeps it on disk.
"""
