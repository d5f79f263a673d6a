"""Reports how much memory a model folder would take to serve, and why an engine would refuse it; loads no weight."""
