"""Static values: what is static, which of them are the same, and what misleads a cache."""
