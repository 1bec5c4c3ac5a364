"""Evaluates entries at a few points with this library, for a comparison side by side."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from kljax.systems._call import Call, run
from kljax.systems._entry import Entry

LOG_RATIOS = (-30.0, -2.7, -1.0, -0.1, 0.0, 1.0, 12.0)
POLICY_LOG_RATIOS = (-1.0, -0.3, -0.1, 0.0, 0.1, 0.3, 1.0)
OLD_LOG_PROB = -1.5
LOG_WEIGHT = 0.5
# A row of three tokens, one of a single token, one without; the first two share a prompt.
MASK = ((1, 1, 1), (1, 0, 0), (0, 0, 0))
PROMPTS = (0, 0, 1)
MAX_LENGTH = 4.0
# The library's names for the log-probs of the policy that drew the tokens.
SAMPLER_LOG_PROBS = ("old_log_probs", "rollout_log_probs", "sampling_log_probs", "ref_log_probs")
POLICY_LOSS_ARRAYS = (*SAMPLER_LOG_PROBS, "log_probs", "advantages", "mask", "key")
ADVANTAGE_ARRAYS = ("rewards", "group_ids", "mask", "num_groups", "kl", "coef")
# Without a KL, every token of a row has the advantage of the row after these.
STEPS_TO_TOKENS = ("broadcast_to_tokens", "subtract_kl", "reinforce_plus_plus_returns")
REWARDS = (1.0, 0.0, 0.0, 0.5, 2.0)
GROUPS = (0, 0, 0, 0, 1)

HEADINGS = {
    "kl": f"value / gradient at x = log pi - log ref; where a ratio enters, log pi - log old = {LOG_WEIGHT}",
    "policy_loss": f"value / gradient at d = log pi - log old for one token, log old = {OLD_LOG_PROB}",
    "reduction": "the weight of a token, in a batch of a row of three tokens, a row of one and a row without any; "
    f"max_length {MAX_LENGTH:g}, the first two rows of one prompt",
    "advantage": "the advantages of four completions of a prompt, rewarded 1, 0, 0 and 0.5, and of one that is alone, "
    "rewarded 2",
}


class Point(NamedTuple):
    """The value of an entry at one point, with its gradient if it has one."""

    at: str
    value: float
    gradient: float | None = None


def numbers(entry: Entry) -> list[Point]:
    """Evaluates an entry at the points of its kind; returns no points if its kind or its call has none."""
    if entry.call is None:
        return []
    if entry.kind == "kl" and entry.call.function == "estimate_kl":
        return _kl(entry, entry.call)
    if entry.kind == "policy_loss" and set(entry.call.required) <= set(POLICY_LOSS_ARRAYS):
        return _policy_loss(entry.call)
    if entry.kind == "reduction":
        return _reduction(entry.call)
    if entry.kind == "advantage" and _takes_one_reward(entry.call):
        return _advantage(entry.call)
    return []


def _takes_one_reward(call: Call) -> bool:
    several_rewards = call.function == "gdpo_advantages"
    per_token = all(step.function in STEPS_TO_TOKENS for step in call.then)
    return not several_rewards and per_token and set(call.required) <= set(ADVANTAGE_ARRAYS)


def _kl(entry: Entry, call: Call) -> list[Point]:
    corrected = "sampling_log_probs" in entry.sources

    def value(x: jax.Array) -> jax.Array:
        sampling = {"sampling_log_probs": jax.lax.stop_gradient(x) - LOG_WEIGHT} if corrected else {}
        return run(call, {"log_probs": x, "ref_log_probs": jnp.zeros_like(x)}, **sampling)

    values, gradients = jax.vmap(jax.value_and_grad(value))(jnp.array(LOG_RATIOS))
    return [Point(f"x = {x:g}", *pair) for x, pair in zip(LOG_RATIOS, _pairs(values, gradients), strict=True)]


def _policy_loss(call: Call) -> list[Point]:
    def value(d: jax.Array, advantage: jax.Array) -> jax.Array:
        # A batch of one token, so that every reduction is the identity.
        old = jnp.full((1, 1), OLD_LOG_PROB)
        arrays = dict.fromkeys(SAMPLER_LOG_PROBS, old)
        arrays |= {"log_probs": old + d, "advantages": jnp.full((1, 1), advantage), "mask": jnp.ones((1, 1), bool)}
        return run(call, arrays | {"key": jax.random.key(0)}).sum()

    points = [(d, a) for a in (1.0, -1.0) for d in POLICY_LOG_RATIOS]
    ds, advantages = (jnp.array(column) for column in zip(*points, strict=True))
    pairs = _pairs(*jax.vmap(jax.value_and_grad(value))(ds, advantages))
    return [Point(f"A = {a:g}, d = {d:g}", *pair) for (d, a), pair in zip(points, pairs, strict=True)]


def _reduction(call: Call) -> list[Point]:
    sizes: dict[str, Any] = {}
    if call.arguments["mode"] == "seq_mean_token_sum_norm":
        sizes = {"max_length": MAX_LENGTH}
    elif call.arguments["mode"] == "prompt_mean":
        sizes = {"group_ids": jnp.array(PROMPTS), "num_groups": 2}
    weights = run(call, {"mask": jnp.array(MASK, bool)}, **sizes)
    return [Point("row of three", float(weights[0, 0])), Point("row of one", float(weights[1, 0]))]


def _advantage(call: Call) -> list[Point]:
    whole_batch = call.arguments.get("num_groups") == 1
    ids = jnp.array([0] * len(GROUPS) if whole_batch else GROUPS)
    mask = jnp.tril(jnp.ones((len(REWARDS),) * 2, bool))
    arrays = {"rewards": jnp.array(REWARDS), "group_ids": ids, "mask": mask, "kl": jnp.zeros(mask.shape)}
    coef = {"coef": 0.0} if "kl" in call.required else {}
    values = run(call, arrays, num_groups=1 if whole_batch else 2, **coef)
    values = values[:, 0] if values.ndim == 2 else values
    labels = [f"reward {reward:g}" + (" alone" if group else "") for reward, group in zip(REWARDS, GROUPS, strict=True)]
    return [Point(label, float(value)) for label, value in zip(labels, values, strict=True)]


def _pairs(values: jax.Array, gradients: jax.Array) -> list[tuple[float, float]]:
    return list(zip(values.tolist(), gradients.tolist(), strict=True))
