"""Several processes (ranks) for one model: how they add up tensors, decide together, and end together."""
