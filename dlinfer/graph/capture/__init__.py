"""Capture: from a Dynamo graph, a function or an exported program to a graph in the dialect (``Captured``)."""
