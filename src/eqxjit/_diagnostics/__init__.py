"""Explanations: why a function was traced, and where the time went.

May import: `_core` and what that may. Start at `history.py`.
"""
