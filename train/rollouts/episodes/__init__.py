"""Episodes of several turns: a policy and an environment that answer each other."""

from train.rollouts.episodes.source import EpisodeSource
from train.rollouts.episodes.turns import Episode, SampledTurn, make_sequences

__all__ = ["Episode", "EpisodeSource", "SampledTurn", "make_sequences"]
