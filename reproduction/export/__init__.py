"""Experiments on the exporter."""
