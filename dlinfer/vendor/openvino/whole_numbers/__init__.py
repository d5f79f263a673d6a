"""Whether the whole numbers of a model stay within the 32 bits that the plugin keeps of int64.

In: a graph, then the ranges of a call's inputs. Out: why the model is not right for the call, or None. Templates and
lowered functions ask.
"""
