"""What a model package is, and what a span of it takes of memory and of computing."""
