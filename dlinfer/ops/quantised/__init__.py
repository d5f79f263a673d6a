"""Linear layers and embeddings of packed weights, and the formats they are packed in."""
