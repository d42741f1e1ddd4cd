"""One call, from top to bottom: what users hold, the slow path, entries, and what JAX traces.

May import: `_fast`, `_spec`. Start at `wrapper.py`.
"""
