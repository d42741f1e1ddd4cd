"""Specs: pytrees taken apart and put together, and stand-ins of static objects."""
