"""What `pytest path/to/eqxjit`, from another working directory, is to leave alone.

`testpaths` counts in the checkout itself only. These need what tests don't.
"""

collect_ignore = ["bench", "docs", "noxfile.py"]
