"""How many examples Hypothesis draws: more with `HYPOTHESIS_PROFILE=thorough`."""

import os

PROFILE = os.environ.get("HYPOTHESIS_PROFILE", "fast")

#: How many sequences of calls are drawn; each compiles for about a quarter of a second.
SCENARIOS = {"fast": 280, "thorough": 10_500}[PROFILE]
