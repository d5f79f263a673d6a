"""The graph engine ``ascend``: regions run as graphs of GE, Ascend's graph engine, built by the vendor's torchair.

torchair is part of torch_npu and is imported when the engine is chosen. ``lowerings`` lowers dlinfer's ops. torchair's
converters take ATen ops; ops without a converter are refused by name.
"""
