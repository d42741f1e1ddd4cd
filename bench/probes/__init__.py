"""Modules that the commands run in fresh processes. Each prints figures as JSON."""
