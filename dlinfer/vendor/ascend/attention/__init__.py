"""Attention: prompts, prompts with a cached beginning, decoding, and attention to chosen positions."""
