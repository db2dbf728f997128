"""Checks that a package computes the same as its source."""
