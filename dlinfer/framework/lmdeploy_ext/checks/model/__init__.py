"""Checks a model: refuses the classes and features that our devices do not serve."""
