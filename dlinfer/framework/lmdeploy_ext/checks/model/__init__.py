"""Checks a model, and refuses model classes and features that our devices do not serve."""
