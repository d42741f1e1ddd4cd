"""What comes after training: freeze, save and load; pack; install in Equinox's place."""
