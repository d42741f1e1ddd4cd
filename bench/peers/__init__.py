"""The models of `bench latency` under other packages: heavy ones, in the extra `peers`."""
