"""One description of a pytree: `split`, `combine`, and keys of static objects.

May import: nothing but what lies beside the packages. Start at `tree.py`.
"""
