"""The models of `bench latency` in other packages, which the extra `peers` installs."""
