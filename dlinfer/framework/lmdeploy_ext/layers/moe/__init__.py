"""Layers of experts, and the routers that choose each token's experts."""
