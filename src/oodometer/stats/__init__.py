"""Rank statistics."""
