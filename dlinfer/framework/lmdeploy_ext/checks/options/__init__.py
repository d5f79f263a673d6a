"""Checks of engine options."""
