"""What LMDeploy's layers make of positions: frequencies by rope type, lengths that they depend on, windows."""
