"""Other libraries and tools, and their private names, which may be removed."""
