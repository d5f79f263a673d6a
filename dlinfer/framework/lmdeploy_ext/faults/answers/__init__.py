"""Patches that give answers as their protocols define them: text, stops, choices, log-probabilities and tool calls."""
