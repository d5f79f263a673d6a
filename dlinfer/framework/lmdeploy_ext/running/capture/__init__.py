"""Runs decoding steps as a device's own graphs: captures each batch size once over fixed buffers, then replays it."""
