"""The peer's server: requests from callers, and answers to queries."""
