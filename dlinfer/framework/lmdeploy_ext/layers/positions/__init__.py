"""Positions in LMDeploy's layers: frequencies by rope type, lengths that they depend on, windows."""
