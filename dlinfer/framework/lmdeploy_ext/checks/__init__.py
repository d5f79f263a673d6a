"""Refuses folders, models, options and requests that are not served, before they cost anything."""
