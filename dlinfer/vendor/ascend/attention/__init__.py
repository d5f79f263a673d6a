"""Attention: prompts, prompts behind cached beginnings, decoding, and to chosen positions."""
