"""Sampling turn by turn in this process: rows of KV cache that stay between the turns of an episode."""

from train.rollouts.engine.programs import EngineSizes, ExtendSize
from train.rollouts.engine.schedule import Engine, Turn

__all__ = ["Engine", "EngineSizes", "ExtendSize", "Turn"]
