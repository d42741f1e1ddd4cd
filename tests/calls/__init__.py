"""A call: its arguments and results, what changes between two of them, and what it is part of."""
