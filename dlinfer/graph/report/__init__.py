"""What is known of every compiled graph, as plain data, and the fallback policy of graphs.

In comes what compilations tell, out come reports and what ``DLINFER_DEBUG`` prints. Rooms above ``passes`` call it.
"""
