"""RMS norm, with and without quantised results."""
