"""Translations of torch's and dlinfer's ops that differ from the standard ones for ONNX.

Some use ONNX Runtime's own ops, which are faster. Others avoid standard ops that ONNX Runtime computes wrongly.
"""
