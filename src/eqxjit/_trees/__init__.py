"""Pytrees: the dynamic and the static half of a call, and the typed static key.

May import: `_code`, `_compat` and `_lock`. Start at `partition.py`.
"""
