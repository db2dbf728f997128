"""Bytes over TLS: streams, requests and answers, listeners, addresses, keys."""
