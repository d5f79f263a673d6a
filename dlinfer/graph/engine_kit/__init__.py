"""What graph engines stand on: weights that are built in, sizes of results, steps of torch, a region run eagerly.

In comes a region, out come the parts that an engine would otherwise write itself. Engines call it.
"""
