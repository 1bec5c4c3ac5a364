"""Accelerators that need not be here: their memory and rates, their topologies, and what their compilers plan."""
