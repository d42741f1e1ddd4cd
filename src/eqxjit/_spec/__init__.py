"""One description of a pytree: `split`, `combine`, and stand-ins for static objects.

Start at `tree.py`.
"""
