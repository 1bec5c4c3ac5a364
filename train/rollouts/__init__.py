"""Where completions come from: one protocol, `Source`, and how a batch is made of what any source answers."""

from train.rollouts.collect import Rollout, collect
from train.rollouts.jax_source import JaxSource, Sampled, Sampler, complete, make_sampler, sampling_program
from train.rollouts.lag import initial_past, next_past, sampling_policy
from train.rollouts.open import open_source
from train.rollouts.source import Completions, Request, Source, SourceError

__all__ = [
    "Completions",
    "JaxSource",
    "Request",
    "Rollout",
    "Sampled",
    "Sampler",
    "Source",
    "SourceError",
    "collect",
    "complete",
    "initial_past",
    "make_sampler",
    "next_past",
    "open_source",
    "sampling_policy",
    "sampling_program",
]
