"""One call, from top to bottom: what users hold, the slow path, entries, and what JAX traces.

May import: `_diagnostics` and what is below that. Start at `wrapper.py`.
"""
