"""The model of a generator: a transformers model over pages, eager or as graphs, with its tokenizer."""
