"""The intermediate representation: FX graphs in the dialect, and analyses of them.

Answers questions about nodes, effects, layouts and sizes, extracts subgraphs, and writes programs that run. It imports
torch and ``torch_private`` only.
"""
