"""Experiments on drafts."""
