"""The product as a whole: generated programs, other tools, processes, packaging, docs."""
