"""Errors of arguments, programs and the user's code: how they read, where they point."""
