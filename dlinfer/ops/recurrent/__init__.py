"""Layers that keep a state per sequence: causal convolution and the gated delta rule."""
