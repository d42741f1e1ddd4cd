"""One call from top to bottom: interruptions, and traces in the middle of it."""
