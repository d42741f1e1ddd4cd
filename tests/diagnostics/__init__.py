"""Explanations: why a function was traced, and where the time went."""
