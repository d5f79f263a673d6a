"""DeepSeek-V4's layers: attention to a window and to compressed entries, and hyper-connections."""
