"""The graph engine ``ascend``: regions as graphs of GE, Ascend's graph engine, written by the vendor's own torchair.

torchair is part of torch_npu and is imported when the engine is chosen. ``lowerings`` holds the lowering of each op of
dlinfer. torchair's converters take ATen ops; an op that they do not take is refused by name.
"""
