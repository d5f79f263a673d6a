"""Checks the files of a model folder: configuration, tokenizer and weights."""
