"""Features beside `filter_jit`: `freeze`, `save` and `load`; `pack`; and `install`.

This package may import `_core` and the layers below it. Start reading at `freeze.py`.
"""
