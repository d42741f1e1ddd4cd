"""A call from top to bottom: the wrapper, the slow path, entries, and the function that JAX traces.

This package may import `_diagnostics` and the layers below it. Start reading at `wrapper.py`.
"""
