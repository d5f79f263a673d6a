"""Reports how much memory a model folder would take to serve, and why an engine would refuse it; loads no weight.

Takes a folder and an engine's options; returns LMDeploy's class, its dtype, its ops, and a plan of memory.
"""
