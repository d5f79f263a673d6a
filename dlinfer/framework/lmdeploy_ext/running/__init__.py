"""How LMDeploy's forward runs: through compiled graphs, or a device's captured graphs."""
