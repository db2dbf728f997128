"""Graphs with fixed shapes and without state, for NPUs."""
