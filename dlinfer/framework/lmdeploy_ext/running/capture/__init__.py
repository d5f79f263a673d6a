"""Decoding steps as a device's own graphs: captured once for each batch size over fixed buffers, then replayed."""
