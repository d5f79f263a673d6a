"""The disk cache of compiled code, for engines, bound calls and self-tests.

An entry is bytes, stored under a key. A read checks the bytes for damage, and returns them, or nothing if they are
damaged.
"""
