"""How to measure: the clock, the competitors, fresh processes, facts of the machine, pictures."""
