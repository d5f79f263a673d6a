"""Passes over graphs in dlinfer's dialect, one in each file. After each pass, the edited graph is verified.

``registry`` lists the passes in order, and ``fusion`` holds the fusion rules. Engines may add passes of their own.
"""
