"""Patches for the start and the end of a server and its processes."""
