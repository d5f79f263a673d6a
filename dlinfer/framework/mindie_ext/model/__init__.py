"""The model of a generator: a transformers model over a paged KV cache, eager or compiled, with its tokenizer."""
