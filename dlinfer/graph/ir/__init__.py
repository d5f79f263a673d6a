"""The one intermediate representation: FX graphs in the dialect, and what can be asked of them.

In comes a graph of capture's; out come answers about its nodes, effects and sizes, cut-out graphs, and programs that
run. It knows torch and the seam only, and every other room may call it.
"""
