"""Ops for attention to compressed windows of tokens, as in DeepSeek-V4."""
