"""Serves GGUF files, the format of llama.cpp: one file with the configuration, the tokenizer and the weights.

LMDeploy reads model folders. So ``folder`` writes a small folder in the user's cache for each file: config.json, the
tokenizer, and an index that names the GGUF file as the only weight file. All further code reads this folder.
"""
