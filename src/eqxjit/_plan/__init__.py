"""One call as data: what to guard, pass and give back; and the Python source that is made of it.

May import: `_trees` and what that may. Start at `plan.py`.
"""
