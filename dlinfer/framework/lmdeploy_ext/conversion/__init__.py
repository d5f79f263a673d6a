"""Converts quantised checkpoints to formats that LMDeploy's layers read, and packs floating-point checkpoints.

A conversion reads a ``quantization_config``, and the checkpoint's tensors one by one. It gives a configuration and
tensors in the layout of AWQ, ``smooth_quant`` or ``fp8``.
"""
