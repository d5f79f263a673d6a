"""The interface of a compiled graph: its inputs, its outputs, and the check that every call goes through.

A function generated from ports, symbols and conditions checks a call's values, and converts them to graph inputs.
"""
