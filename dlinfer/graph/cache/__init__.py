"""What was compiled, on disk: entries by key, checked when they are read.

In come keys and bytes, out come the same bytes or nothing. Engines, bound calls and artifacts call it.
"""
