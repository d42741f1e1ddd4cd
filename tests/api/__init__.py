"""The wrapped function: its attributes, methods, pytree, and ahead-of-time compilation."""
