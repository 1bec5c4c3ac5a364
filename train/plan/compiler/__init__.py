"""Accelerators that need not be here: their topologies, and what their compilers plan."""
