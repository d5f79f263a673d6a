"""The disk cache of compiled code: entries by key, checked when they are read.

Engines, bound calls and self-tests store bytes here and read the same bytes, or nothing.
"""
