"""Decoding steps as a device's own graphs: captured once a batch size over buffers that stay, and replayed.

In: LMDeploy's keywords of a forward. Out: its result, and counts of what was captured, replayed and run eagerly, and
why. ``layers.backend`` calls it for devices that say ``Device.graph_class``.
"""
