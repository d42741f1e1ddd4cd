"""Fast paths, which replay the slow path behind guards: in C, or in generated Python.

This package may import `_spec` and the layers below it. Start reading at `make.py`.
"""
