"""Whole programs, and questions that users of `filter_jit` ask, with eqxjit's answers."""
