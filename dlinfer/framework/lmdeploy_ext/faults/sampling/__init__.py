"""Patches for the choice of the next token, and for the logits that are returned."""
