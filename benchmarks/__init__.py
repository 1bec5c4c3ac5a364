"""Benchmarks: each module that can be run makes one table of the documentation."""
