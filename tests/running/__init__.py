"""While programs run: asynchrony, threads, devices, and memory."""
