"""Ops over the processes (ranks) of one model."""
