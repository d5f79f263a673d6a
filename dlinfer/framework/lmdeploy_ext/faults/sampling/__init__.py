"""Corrects the choice of the next token, and the logits that are returned."""
