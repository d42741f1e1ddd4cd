"""What only somebody who asks reads: the compile report and its timeline, and the trial.

May import: `_deploy` and what is below that. Start at `report.py`, or at `trial.py`.
"""
