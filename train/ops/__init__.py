"""Operators with several implementations: a folder each, one file an implementation, one function that chooses."""
