"""Routers before servers: what each changes, loses and costs. ``python -m benchmarks.routers --help``."""
