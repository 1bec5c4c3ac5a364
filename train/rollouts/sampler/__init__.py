"""Sampling in this process: continuous batching in compiled programs."""

from train.rollouts.sampler.draw import Sampling
from train.rollouts.sampler.engine import Samples, sample, samples_sharding
from train.rollouts.sampler.stops import StopTable, stop_table
from train.rollouts.sampler.windows import WindowedSampler

__all__ = ["Samples", "Sampling", "StopTable", "WindowedSampler", "sample", "samples_sharding", "stop_table"]
