"""The disk cache of compiled code, for engines, bound calls and self-tests.

An entry is some bytes, stored under a key. Each read checks them for damage, and returns the stored bytes or nothing.
"""
