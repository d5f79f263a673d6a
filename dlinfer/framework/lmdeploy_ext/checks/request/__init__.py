"""Checks requests, and turns refusals into HTTP errors."""
