"""One description of a pytree: `split`, `combine`, and stand-ins for static objects.

May import: nothing but what lies beside the packages. Start at `tree.py`.
"""
