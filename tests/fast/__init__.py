"""Fast paths: beside the slow one, in C, and as generated source."""
