"""Ops with a state for each sequence, on CPU. No Python loop runs over tokens or sequences."""
