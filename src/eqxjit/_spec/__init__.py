"""One description of a pytree: `split`, `combine`, and stand-ins for static objects.

May import: `_code`. Start at `tree.py`.
"""
