"""The compile report with its timeline, and the trial, which only those who ask for them need.

May import: `_deploy` and what is below that. Start at `report.py`, or at `trial.py`.
"""
