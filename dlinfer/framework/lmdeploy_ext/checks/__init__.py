"""Refuses unsupported model folders, models, options and requests before any work is spent on them."""
