"""HTTP connections: the server and its limits, the guard, server-sent events."""
