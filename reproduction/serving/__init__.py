"""Experiments with peers and gateways that serve many users."""
