"""Tests, in folders that mirror the layers of `src/eqxjit`; tests of the project in `project`."""
