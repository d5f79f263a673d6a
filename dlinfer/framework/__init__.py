"""FOR WHOM: adaptors that put the fused ops under serving frameworks."""
