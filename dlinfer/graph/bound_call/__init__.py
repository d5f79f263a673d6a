"""Compiled calls that hold their weights, without Dynamo's guards: for adaptors that know what changes between calls.

``capture`` takes a function and an example call, and returns a ``BoundCall`` (``call``). ``store`` keeps it on disk.
"""
