"""Positions in LMDeploy's layers: rotary frequencies, the lengths that these depend on, and sliding windows."""
