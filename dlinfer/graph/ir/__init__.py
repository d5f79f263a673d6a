"""The intermediate representation: FX graphs in the dialect, and analyses of them.

The modules answer questions about nodes, effects, layouts and sizes, extract subgraphs, and write programs that run.
They import torch and ``torch_private`` only.
"""
