"""Generated source: the guards, the flat arrays and the output of one specialised call.

May import: `_trees` and what that may. Start at `guards.py`.
"""
