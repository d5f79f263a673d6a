"""Checks of a model folder: its configuration, its weights, its adapters."""
