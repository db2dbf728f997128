"""Shared parts of experiments: processes, peers, users, network delay, prompts."""
