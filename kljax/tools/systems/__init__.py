"""The command that looks up and compares the names of `kljax.systems`."""
