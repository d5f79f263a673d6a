"""Passes over graphs in the dialect, one in each file. A pass edits a graph in place, and the graph is then verified.

``registry`` lists the passes in order, and ``fusion`` holds the fusion rules. Engines may add passes of their own.
"""
