"""Pytrees: the dynamic and the static half of a call, and the typed static key."""
