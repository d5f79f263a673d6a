"""Answers as their protocols define them: text, stops, choices, log-probabilities and tool calls."""
