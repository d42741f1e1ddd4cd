"""Reports on what is compiled, and command lines that make them."""
