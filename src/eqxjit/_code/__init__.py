"""Code as Python sees it: generated source, call sites, definitions, tracebacks.

May import: `_compat` and `_lock`. Start at `source.py`.
"""
