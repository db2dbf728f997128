"""A peer from its start to its end."""
