"""The wrapper: what it offers, as a pytree, for other tools, and in other processes."""
