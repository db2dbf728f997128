"""Routing: which peers a session runs through. Pure functions over records and measured links."""
