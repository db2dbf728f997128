"""Running a compiled span: used by a peer for its layers and by a client for its draft."""
