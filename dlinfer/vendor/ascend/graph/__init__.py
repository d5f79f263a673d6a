"""The engine ``ascend``: it runs regions of a captured graph as graphs of GE, the graph compiler in CANN.

The vendor's torchair builds these graphs. It is part of torch_npu and is imported when the engine is chosen.
``lowerings`` turns dlinfer's ops into ops that torchair converts. If torchair cannot
convert another op, the engine refuses it by name.
"""
