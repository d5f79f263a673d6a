"""Compiled calls without Dynamo's guards, for adaptors that know what can change between two calls.

In come a function and an example call, out comes a ``BoundCall``, kept on disk by ``store``. Adaptors call it.
"""
