"""Capture a Dynamo graph, a function or an exported program as a graph in dlinfer's dialect (``Captured``)."""
