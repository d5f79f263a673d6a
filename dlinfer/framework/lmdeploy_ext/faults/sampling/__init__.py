"""Which token comes next, and which logits are returned."""
