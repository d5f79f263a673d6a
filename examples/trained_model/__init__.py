"""Train a small Llama on the docstrings of Python's standard library: real weights where no model hub is reached."""
