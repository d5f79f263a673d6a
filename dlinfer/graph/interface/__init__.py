"""The interface of a compiled graph: its inputs, its outputs, and the check that every call goes through.

From ports, symbols and conditions this package generates a function that checks a call's values, and converts them to
the graph's inputs.
"""
