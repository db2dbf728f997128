"""Sessions on a peer, and their steps."""
