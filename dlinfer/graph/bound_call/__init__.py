"""Compile a function once and call it without Dynamo guards.

This is for adaptors that know which arguments change between calls. ``capture`` compiles a function for an example
call, and returns a ``BoundCall`` (module ``call``): the compiled graph together with its weights. ``store`` keeps bound
calls on disk.
"""
