"""Draw each sequence's next token by its own text and rules, so that it is the same alone, in a batch, or in chunks."""
