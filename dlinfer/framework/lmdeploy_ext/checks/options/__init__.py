"""Checks engine options, and refuses those that are not served."""
