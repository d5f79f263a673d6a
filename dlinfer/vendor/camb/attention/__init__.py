"""Attention: prompts, prompts behind cached beginnings, and decoding."""
