"""Sampling in this process: continuous batching in one compiled program."""

from train.rollouts.sampler.draw import Sampling
from train.rollouts.sampler.engine import Samples, sample, samples_sharding
from train.rollouts.sampler.stops import StopTable, stop_table

__all__ = ["Samples", "Sampling", "StopTable", "sample", "samples_sharding", "stop_table"]
