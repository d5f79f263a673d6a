"""Ops with a state for each sequence on CPU: no Python loop over tokens, in prefill none over sequences either."""
