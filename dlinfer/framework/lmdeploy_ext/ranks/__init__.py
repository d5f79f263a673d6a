"""Patches for a model that runs in several processes, its ranks: how ranks start, sum tensors, communicate and end."""
