"""What only somebody who asks reads: the compile report and its timeline.

May import: `_deploy` and what is below that. Start at `report.py`.
"""
