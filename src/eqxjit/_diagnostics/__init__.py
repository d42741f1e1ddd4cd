"""Records of traces: why each function was traced, and where the time went.

This package may import `_spec` and the layers below it. Start reading at `history.py`.
"""
