"""Checkpoints and adapters that LMDeploy would misread, or stop at in words of its own."""
