"""Other libraries and tools, and private names of theirs that may go."""
