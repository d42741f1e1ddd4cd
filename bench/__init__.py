"""Benchmarks of eqxjit, run from the root of the repository: `python -m bench COMMAND`."""
