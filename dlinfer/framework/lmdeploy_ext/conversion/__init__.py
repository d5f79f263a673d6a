"""Converts quantised checkpoints to formats that LMDeploy's layers read, and packs floating-point checkpoints.

A conversion takes a ``quantization_config``, and the checkpoint's tensors one by one. It returns a
``quantization_config`` and tensors in a format that LMDeploy knows: AWQ, ``smooth_quant`` or ``fp8``.
"""
