"""Mixture-of-experts layers, and the routers that choose each token's experts."""
