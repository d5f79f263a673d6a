"""Models that LMDeploy computes differently from transformers."""
