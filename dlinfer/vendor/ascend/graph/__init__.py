"""The graph engine ``ascend``: regions as graphs of GE, Ascend's graph engine, written by the vendor's own torchair.

torchair is part of torch_npu and is imported when the engine is chosen. What each op of dlinfer becomes is in
``lowerings``; ops of ATen are left to torchair's converters, and what these do not take is refused by name.
"""
