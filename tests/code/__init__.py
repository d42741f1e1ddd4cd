"""Code as Python sees it: locations and tracebacks."""
