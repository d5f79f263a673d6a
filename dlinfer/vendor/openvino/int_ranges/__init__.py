"""Whether the whole numbers of a region stay within the bits that an engine keeps, where these are fewer than torch's.

In: a graph, then the ranges of a call's inputs. Out: why the engine is not right for the call, or None.
"""
