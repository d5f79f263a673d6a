"""Attention of prompts, of prompts whose beginning is cached, and of decode steps."""
