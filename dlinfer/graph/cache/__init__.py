"""The disk cache of compiled code, for engines, bound calls and self-tests.

Each entry is bytes under a key, and checked on reading. A read returns the stored bytes, or nothing.
"""
