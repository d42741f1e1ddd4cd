"""`eqxjit.trial` and `python -m eqxjit --trial`."""
