"""Runs LMDeploy's forward: through compiled graphs, through graphs that the device captures, or eagerly."""
