"""Passes: a graph in the dialect comes in, the same graph leaves with edits, verified around each pass.

One pass a file; ``fusion`` holds the rules, which are data. Lowering runs them; engines may bring passes of their own.
"""
