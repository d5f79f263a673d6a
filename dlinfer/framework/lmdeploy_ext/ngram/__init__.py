"""Speculative decoding without a draft model: draft tokens come from the sequence's own text."""
