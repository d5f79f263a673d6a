"""Checks a model, and refuses classes and features that our devices do not serve."""
