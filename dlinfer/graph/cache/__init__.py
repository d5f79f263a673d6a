"""The disk cache of compiled code, for engines, bound calls and self-tests.

The cache keeps bytes under keys. It checks the bytes for damage when they are read, and treats damaged bytes as
missing.
"""
