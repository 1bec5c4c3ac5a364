"""Compiling for accelerators that are not here: what their compilers plan in memory, collectives and time."""
