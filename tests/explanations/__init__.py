"""Explanations of traces: reasons, advice, the log, limits and storms."""
