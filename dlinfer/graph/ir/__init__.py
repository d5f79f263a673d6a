"""The intermediate representation: FX graphs in dlinfer's dialect (``dialect``), and analyses of them.

The modules analyze nodes, effects, layouts and sizes, extract subgraphs, and write programs that run. They import only
torch and ``torch_private``.
"""
