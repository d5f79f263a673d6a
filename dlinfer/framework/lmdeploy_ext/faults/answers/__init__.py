"""Makes answers follow their protocols: their text, stops, choices, log-probabilities and tool calls."""
