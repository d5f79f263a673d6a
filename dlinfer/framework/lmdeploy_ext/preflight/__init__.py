"""Reports the memory that serving a model folder would take, and why an engine would refuse it. Loads no weight."""
