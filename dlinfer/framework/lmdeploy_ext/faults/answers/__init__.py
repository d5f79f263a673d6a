"""Patches that make answers follow their protocols: text, stops, choices, log-probabilities and tool calls."""
