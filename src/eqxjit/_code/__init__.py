"""Code as Python sees it: whose a file is, generated source, call sites, tracebacks.

May import: `_compat` and `_interruptions`. Start at `source.py`.
"""
