"""The page of a run: curves, recorded rollouts and their tokens in one HTML file."""
