"""The interface of a compiled graph: what it takes and gives, and the one check that every call goes through.

In: ports, symbols and conditions. Out: a generated function that checks a call's values and makes them the graph's.
"""
