"""Hypothesis has no deadline in these tests: a busy machine must not fail a test."""

from __future__ import annotations

from hypothesis import settings

settings.register_profile("any machine", deadline=None)
settings.load_profile("any machine")
