"""Patches for models that LMDeploy computes differently from transformers."""
