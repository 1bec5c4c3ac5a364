"""The config of a run: schema, checks and loading. Imports neither jax nor kljax, so that mistakes show at once."""
