"""Checks of a model folder: its configuration, its tokenizer, its weights."""
