"""Specs, which describe pytrees: `split`, `combine`, and the keys of static objects.

This package may import no other package, only the modules beside the packages, such as
`_compat.py`. Start reading at `tree.py`.
"""
