"""Sessions: load an artifact, run it, measure its runs and describe its inputs and outputs.

A run takes a dict of arrays by the names of the inputs, and returns a dict of arrays. The session of the qaic vendor is
built on these sessions.
"""
