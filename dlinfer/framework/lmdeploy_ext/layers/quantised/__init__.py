"""Layers of weights and caches in few bits."""
