"""Converts quantised checkpoints to formats that LMDeploy's layers read, and packs checkpoints in floats.

Takes a ``quantization_config`` and the checkpoint's tensors one by one; returns a configuration and tensors in the
layout of AWQ, ``smooth_quant`` or ``fp8``. The checks of folders, the reading of a model's configuration and LMDeploy's
loader of weights call it.
"""
