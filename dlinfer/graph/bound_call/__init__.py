"""Compiled calls that hold their weights, without Dynamo's guards: for adaptors that know what changes between calls.

In come a function and an example call, out comes a ``BoundCall``, kept on disk by ``store``. Adaptors call it.
"""
