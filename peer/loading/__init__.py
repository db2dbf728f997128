"""Which span a peer serves, its files, its self-test, loading it."""
