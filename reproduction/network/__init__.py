"""Experiments on the network between hops."""
