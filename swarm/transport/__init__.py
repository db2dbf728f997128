"""Connections over TCP and TLS: streams, channels of requests and answers, listeners, addresses, keys."""
