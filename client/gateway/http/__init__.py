"""HTTP connections: the server, its limits, who is let in, server-sent events."""
