"""A server: how do I serve a frozen model over HTTP, at low latency?

`train` writes a classifier of the UCI digits to a file, `serve` answers requests with it on this
machine alone. `python -m bench.examples.digits_server --help`.
"""
