"""Memory, collectives and time that the compilers of accelerators plan."""
