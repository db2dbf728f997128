"""The life cycle of a peer: listen, bootstrap, join, shut down."""
