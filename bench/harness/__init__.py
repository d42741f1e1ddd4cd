"""What all commands share: timing, competitors, fresh processes, records, printing."""
