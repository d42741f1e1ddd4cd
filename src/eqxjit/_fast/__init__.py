"""Fast paths: guarded replays of the slow path, in C or in generated Python.

May import: `_spec`. Start at `make.py`.
"""
