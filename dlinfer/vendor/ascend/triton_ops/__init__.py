"""Kernels in Triton for Ascend: none. LMDeploy asks for the card's properties before it builds a model."""
