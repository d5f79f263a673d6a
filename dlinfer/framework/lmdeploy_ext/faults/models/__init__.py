"""Models that LMDeploy computes otherwise than transformers."""
