"""Decoding steps as a device's own graphs: captured once a batch size over fixed buffers, and replayed."""
