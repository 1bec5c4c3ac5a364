"""Sampling turn by turn in this process: rows of KV cache that stay between the turns of an episode."""

from train.rollouts.engine.programs import EngineSizes, ExtendSize
from train.rollouts.engine.schedule import Turn, TurnEngine

__all__ = ["EngineSizes", "ExtendSize", "Turn", "TurnEngine"]
