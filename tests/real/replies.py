"""Replies of a run's policy to held-out problems, and the log-probs of tokens."""

import jax
import jax.numpy as jnp
import numpy as np

import kljax
from train.context import RunContext
from train.data.prompts import encode_prompts
from train.models import Decoder
from train.rl.policy import ScoredPolicy, Sequences, token_stats
from train.rollouts.jax_source import make_sampler


def draw_replies(context: RunContext, policy: kljax.Policy, prompts: int, *, greedy: bool = False) -> Sequences:
    """Replies to the first held-out problems, sampled at the temperature of the run or greedily."""
    config = context.config
    ids, mask = encode_prompts(context.held_out[:prompts], context.tokenizer, config.data.max_prompt_length)
    draw = make_sampler(context, "greedy" if greedy else "held_out")
    samples = draw(policy, jnp.asarray(ids), jnp.asarray(mask), jax.random.key(config.seed))
    return Sequences.rows(samples.tokens, samples.token_mask, samples.completion_mask)


def score(model: Decoder, policy: kljax.Policy, sequences: Sequences, *, temperature: float = 1.0) -> np.ndarray:
    """Computes the log-prob of every token given the tokens before it, 0 at the first."""

    def log_probs(policy: kljax.Policy) -> jax.Array:
        return token_stats(ScoredPolicy(model, policy), sequences, temperature=temperature)[0].log_prob

    return np.asarray(jax.jit(log_probs)(policy))
