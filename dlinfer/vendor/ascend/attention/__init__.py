"""Attention of prompts, of prompts whose beginning is cached, and of decode steps, and DeepSeek's sparse attention."""
