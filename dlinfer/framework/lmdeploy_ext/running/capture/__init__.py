"""Runs decoding steps as graphs that the device captures. Each batch size is captured once over fixed buffers."""
