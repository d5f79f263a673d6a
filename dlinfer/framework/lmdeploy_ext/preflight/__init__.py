"""Reports how much memory serving a model folder would take, and why an engine would refuse it. Loads no weights."""
