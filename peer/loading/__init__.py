"""Choosing a span, getting its files, testing and loading it."""
