"""Linear layers of floating-point weights, and LoRA."""
