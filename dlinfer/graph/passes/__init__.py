"""Passes over graphs in the dialect, one a file. Each edits a graph in place, and is verified after it ran.

``registry`` lists them in order, and ``fusion`` holds the fusion rules. Engines may add passes of their own.
"""
