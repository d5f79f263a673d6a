"""Corrects models that LMDeploy computes differently from transformers."""
