"""Refuses model folders, models, engine options and requests that are not served, before any work is spent on them."""
