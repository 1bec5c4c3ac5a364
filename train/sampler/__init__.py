"""Sampling in this process: continuous batching, in one compiled program."""

from train.sampler.draw import Sampling
from train.sampler.sample import sample
from train.sampler.samples import Samples, samples_sharding
from train.sampler.stops import StopTable, stop_table

__all__ = ["Samples", "Sampling", "StopTable", "sample", "samples_sharding", "stop_table"]
