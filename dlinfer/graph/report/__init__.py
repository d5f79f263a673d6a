"""Reports of compiled graphs, as plain data, and the fallback policy of graphs.

Compilations emit facts; a report collects them and ``DLINFER_DEBUG`` prints them. Rooms above ``passes`` call it.
"""
