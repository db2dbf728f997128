"""Experiments on what lies between hops."""
