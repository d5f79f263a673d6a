"""From a Dynamo graph, a function or an exported program to a graph in the dialect.

In come torch's graphs and fake tensors, out comes ``Captured``. The backend, ahead-of-time compilation and artifacts
call it.
"""
