"""Fast paths: guarded replays of the slow path, in C or in generated Python.

May import: `_spec`, `_code`. Start at `make.py`.
"""
