"""How the engine steps: the model on its own thread, prompts joined with decoding, sizes of prompt chunks."""
