"""Tests, in folders that mirror the layers of `src/eqxjit`; of the whole product in `product`."""
