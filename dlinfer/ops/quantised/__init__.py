"""Linear layers and embeddings with quantised or packed weights, and the formats of these weights."""
