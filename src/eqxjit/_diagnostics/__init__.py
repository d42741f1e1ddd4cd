"""Records of traces: why each function was traced, and where the time went.

May import: `_spec` and what is below that. Start at `history.py`.
"""
