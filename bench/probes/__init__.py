"""What runs in fresh processes, for what a process can do only once: they print figures."""
