"""Experts and who chooses them."""
