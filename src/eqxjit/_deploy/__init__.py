"""What comes after training: freeze, save and load; pack; install in Equinox's place.

May import: `_core` and what is below that. Start at `freeze.py`.
"""
