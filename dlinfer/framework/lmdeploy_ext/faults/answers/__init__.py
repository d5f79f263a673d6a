"""What a client receives: text, stops, choices, log-probabilities and tool calls, as their protocols say."""
