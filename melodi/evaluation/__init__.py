"""Weights to numbers."""
