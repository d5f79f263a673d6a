"""Patches on the engine's steps: a thread for the model, prefill joined with decoding, sizes of prompt chunks."""
