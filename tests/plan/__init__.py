"""Specialised calls: binding, guards, outputs and the generated source."""
