"""Worked examples: a question that users of `filter_jit` ask, and how eqxjit answers it."""
