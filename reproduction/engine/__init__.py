"""Experiments on graphs in one process, and on the memory of a peer."""
