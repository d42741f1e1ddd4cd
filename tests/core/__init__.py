"""One call from top to bottom."""
