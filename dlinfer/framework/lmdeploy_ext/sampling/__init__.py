"""Draw the next token so that it does not depend on the batch, the chunks of the prompt or other requests."""
