"""The disk cache of compiled code. Each entry is stored under a key, and checked when it is read.

Engines, bound calls and self-tests store bytes here. A read returns the stored bytes, or nothing.
"""
