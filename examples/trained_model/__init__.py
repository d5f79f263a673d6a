"""A small Llama, trained on the docstrings of Python's standard library: real weights without a model hub."""
