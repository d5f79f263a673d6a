"""Layers with weights or caches of few bits."""
