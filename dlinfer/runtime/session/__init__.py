"""Sessions: an artifact that was loaded, run by the names of its inputs and outputs, measured and described.

In come dicts of arrays, out come dicts of arrays. Users and the qaic vendor's session call it.
"""
