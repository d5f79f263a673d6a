"""HOW a model becomes a compiled graph: capture, passes, partition, engines."""
