"""Layers with states of a sequence: causal convolution and the gated delta rule."""
