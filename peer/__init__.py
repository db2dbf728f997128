"""Serving a span: what `swarm join` runs."""
