"""Calls: the generic path, compilation, errors, donation, threads, memory."""
