"""Experiments on peers and gateways that serve many users."""
