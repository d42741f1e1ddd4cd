"""The compile report and its timeline, which only those who ask for them need.

May import: `_deploy` and what is below that. Start at `report.py`.
"""
