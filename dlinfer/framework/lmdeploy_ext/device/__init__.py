"""The device under LMDeploy: which one is active, what LMDeploy sees of torch, its configuration, caches and memory.

In come LMDeploy's questions about devices, out come answers for ours. Every other room here asks ``activation``.
"""
