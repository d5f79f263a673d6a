"""Reports of compiled graphs, as plain data, and the fallback policy of graphs.

A compilation emits facts; a report collects them, and ``DLINFER_DEBUG`` prints them.
"""
