"""Compiled calls that hold their weights and need no Dynamo guards, for adaptors that know what changes between calls.

``capture`` takes a function and an example call, and returns a ``BoundCall`` (``call``). ``store`` keeps bound calls on
disk.
"""
