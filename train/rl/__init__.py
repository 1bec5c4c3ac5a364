"""The compute core: everything that is compiled in an RL step."""
