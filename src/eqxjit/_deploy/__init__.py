"""What comes after training: freeze, save and load; pack; install in Equinox's place.

May import: `_api` and what that may. Start at `freeze.py`.
"""
