"""Checks of a model: which classes and features are served on our devices."""
