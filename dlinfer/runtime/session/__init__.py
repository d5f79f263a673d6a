"""Sessions: an artifact that was loaded, run by the names of its inputs and outputs, measured and described.

A run takes a dict of arrays and returns one. Users and the qaic vendor's session call it.
"""
