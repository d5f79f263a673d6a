"""Checks a model folder: its configuration, its tokenizer and its weights."""
