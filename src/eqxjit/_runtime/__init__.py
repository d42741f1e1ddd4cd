"""Calls: dispatch, the cache, its entries, the miss path and what JAX traces in it.

May import: `_plan` and what that may; diagnostics come in by `hooks.py`. Start at `dispatch.py`.
"""
