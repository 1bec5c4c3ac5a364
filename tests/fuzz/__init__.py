"""Random damage for every reader of what others wrote."""
