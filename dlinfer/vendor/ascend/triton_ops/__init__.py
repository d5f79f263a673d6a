"""Kernels in Triton for Ascend: there are none, but LMDeploy asks for the card's properties to build a model."""
