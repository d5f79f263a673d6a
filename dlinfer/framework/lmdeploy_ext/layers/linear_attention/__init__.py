"""Layers that keep a state for each sequence: causal convolution and the gated delta rule."""
