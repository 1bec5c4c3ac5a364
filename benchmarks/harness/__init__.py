"""Processes, interleaved rounds, targets and tables that all benchmarks share."""
