"""Attention: prompts, prompts with a cached beginning, and decoding."""
