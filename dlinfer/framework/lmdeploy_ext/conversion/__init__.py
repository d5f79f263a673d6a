"""Quantised checkpoints in formats that LMDeploy's layers do not read, as they become one that they do.

In comes ``quantization_config`` and, while weights load, tensor by tensor of the files; out goes the configuration of
AWQ, ``smooth_quant`` or ``fp8`` and tensors as those have them. Called by the checks of checkpoints, by the reading of
a model's configuration, and by LMDeploy's loader of weights.
"""
