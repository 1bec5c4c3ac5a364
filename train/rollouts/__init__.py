"""Rollouts: the protocol `Source`, its implementations, and the batch made from their completions."""

from train.rollouts.collect import Rollout, collect, draw, judge_drawn, judge_together
from train.rollouts.jax_source import (
    JaxSource,
    Sampler,
    begin_samples,
    completions_of,
    evaluation_programs,
    make_sampler,
    rollout_programs,
    rollout_rows,
    rollout_sampling,
    sampling_program,
)
from train.rollouts.lag import initial_past, next_past, sampling_policy
from train.rollouts.open import open_source
from train.rollouts.source import Completions, Request, Source, SourceError

__all__ = [
    "Completions",
    "JaxSource",
    "Request",
    "Rollout",
    "Sampler",
    "Source",
    "SourceError",
    "begin_samples",
    "collect",
    "completions_of",
    "draw",
    "evaluation_programs",
    "initial_past",
    "judge_drawn",
    "judge_together",
    "make_sampler",
    "next_past",
    "open_source",
    "rollout_programs",
    "rollout_rows",
    "rollout_sampling",
    "sampling_policy",
    "sampling_program",
]
