"""The two kinds of connections of a peer: callers, and next hops."""
