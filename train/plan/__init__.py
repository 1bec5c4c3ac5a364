"""Plans: the programs of a config, compiled for hardware that is not here, and read."""
