"""The commands of `python -m bench`, a file each: parse, measure, report, write."""
