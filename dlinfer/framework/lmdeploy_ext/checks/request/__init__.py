"""Checks requests, and answers refused ones with HTTP errors."""
