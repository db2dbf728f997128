"""The two kinds of connections of a peer: from callers, and to next hops."""
