"""Segments to weights."""
