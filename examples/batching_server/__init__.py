"""A small continuous-batching server over GeneratorTorch, by its public methods alone."""
