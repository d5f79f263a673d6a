"""Ops with a state for each sequence on CPU. No Python loop runs over tokens, nor in prefill over sequences."""
