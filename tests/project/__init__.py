"""The project: its layers, package, types, pages and examples."""
