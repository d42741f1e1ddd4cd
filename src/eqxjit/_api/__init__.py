"""The public surface of a wrapped function: `filter_jit`, `lower` and `compile`.

May import: `_diagnostics` and what that may. Start at `wrapper.py`.
"""
