"""LoRA adapters of LMDeploy's engine: the layers that hold them, and their changes while the engine runs."""
