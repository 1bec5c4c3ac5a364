"""Advantage estimators on recorded cases."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import kljax
from kljax import systems
from kljax.systems import Call, Entry
from kljax.systems._call import run
from tests.goldens import compare, epsilon
from tests.goldens.cases import Case
from tests.kljax.systems.exercises import call_of, exercise, options, part

PAIRS = {"group_ids": np.array([0, 0, 1, 1, 2, 2], np.int32), "num_groups": 3}
# Names that the systems' arrays of rewards have in the cases.
TOKEN_REWARDS = ("token_rewards", "token_level_rewards", "outcome_rewards")
VERL = ("grpo", "grpo_vectorized", "grpo_passk", "rloo", "rloo_vectorized", "opo", "gpg", "gdpo", "remax")
TRINITY = ("GRPO", "RLOO", "OPMD", "ASYMRE", "REINFORCEPLUSPLUS", "REMAX", "PPO")


def arrays_of(case: Case) -> dict[str, Any]:
    """The arrays of an advantage estimator by this library's names, as far as the case has them."""
    actual = {name: case.given(name) for name in case.inputs}
    if "group" in actual:
        actual["group_ids"] = actual["group"]
    actual["token_rewards"] = next((actual[name] for name in TOKEN_REWARDS if name in actual), None)
    if "reward_components" in actual:
        actual["rewards"] = actual["reward_components"]
    elif "rewards" not in actual:
        actual["rewards"] = kljax.masked_sum(actual["token_rewards"], actual["mask"], axis=-1)
    return actual


def whitened(entry: Entry, case: Case, values: jax.Array, step: Call) -> jax.Array:
    """The entry's last step as the system does it: verl and Trinity with an epsilon in the mean too."""
    mask = case.given("mask")
    assert step.function == "masked_whiten"
    if entry.system in ("verl", "trinity"):
        assert not step.arguments
        return jnp.where(mask, epsilon.whiten(values, mask), 0)
    return kljax.masked_whiten(values, mask, **step.arguments)


@exercise(
    *(("verl", f"compute_{name}_outcome_advantage") for name in VERL),
    *(("verl", f"compute_reinforce_plus_plus{name}_outcome_advantage") for name in ("", "_baseline")),
    *(("skyrl", f"compute_{name}_outcome_advantage") for name in ("grpo", "rloo", "reinforce_plus_plus")),
    *((system, "compute_gae_advantage_return") for system in ("verl", "skyrl")),
    *(("verl", f"compute_{prefix}optimal_token_baseline_advantage") for prefix in ("", "multi_turn_")),
    *(("trinity", f"{name}AdvantageFn") for name in TRINITY),
    *(("trinity", f"{name}GroupAdvantage") for name in ("OPMD", "ASYMRE", "REINFORCE")),
    *(("trinity", f"{name}GroupedAdvantage") for name in ("GRPO", "REC")),
    ("skyrl", "compute_maxrl_advantage"),
    ("openrlhf", "get_advantages_and_returns"),
    ("openrlhf", "get_cumulative_returns"),
    ("slime", "get_reinforce_plus_plus_returns"),
    ("slime", "ppo_kl_shaped_gae"),
)
def estimator(named: Entry, case: Case) -> None:
    entry = part("advantage", named, case)
    call, mask = call_of(entry), case.given("mask")
    assert entry is not None
    steps = [step for step in call.then if step.function != "broadcast_to_tokens"]
    arrays = inputs_of(entry, part("placement", named, case), case)
    result = run(dataclasses.replace(call, then=()), arrays, **keywords(entry, case))
    advantages, returns = result if isinstance(result, tuple) else (result, None)
    if advantages.ndim == 1:
        advantages = kljax.broadcast_to_tokens(advantages, mask)
    if returns is None and call.function == "reinforce_plus_plus_returns":
        returns = advantages
    if steps and "advantages" in case.outputs and case.function != "get_advantages_and_returns":
        advantages = whitened(entry, case, advantages, *steps)
    if returns is None:
        returns = advantages  # one array in the systems
    if "raw_kl" in case.outputs:
        case.assert_matches(kljax.masked(case.given("kl"), mask), jnp.where(mask, case.result("raw_kl"), 0))
    for name, values in (("advantages", advantages), ("returns", returns)):
        if name in case.outputs:
            case.assert_matches(values, jnp.where(mask, case.result(name), 0))


def inputs_of(entry: Entry, placement: Entry | None, case: Case) -> dict[str, Any]:
    """The arrays of the entry's function; rewards per token where it takes those, with slime's KL in them."""
    arrays, function = arrays_of(case), call_of(entry).function
    if case.system == "slime":
        kl, coef = arrays["kl"], case.params["kl_coef"]
        shaped = {"scores": arrays["rewards"], "log_probs": kl, "ref_log_probs": jnp.zeros_like(kl)}
        arrays["token_rewards"], _ = run(call_of(placement), {**shaped, "mask": arrays["mask"]}, coef=coef)
    if function == "gae":
        arrays["rewards"] = arrays["token_rewards"]
    elif function == "broadcast_to_tokens":
        arrays["advantages"] = arrays["rewards"]
    return arrays


def keywords(entry: Entry, case: Case) -> dict[str, Any]:
    """The options of the case, and how many groups there are."""
    arguments = options(entry, case) | {"num_groups": compare.NUM_GROUPS}
    if isinstance(arguments.get("weights"), bool):
        del arguments["weights"]  # whether verl was given importance weights
    if "is_weights" in case.inputs:
        arguments["weights"] = case.given("is_weights")
    elif "weights" in arguments:
        arguments["weights"] = jnp.array(arguments["weights"])
    return arguments


@exercise(("slime", "get_reinforce_plus_plus_baseline_advantages"))
def slime_baseline(entry: Entry, case: Case) -> None:
    # The recorded function gets rewards that are centred already. Each row and its negative are a group here, whose
    # mean is 0, so that the centring of the whole call leaves the rewards as they are.
    arrays = {name: case.given(name) for name in ("rewards", "kl", "mask")}
    both = {name: jnp.concatenate([value, value]) for name, value in arrays.items()}
    both["rewards"] = jnp.concatenate([arrays["rewards"], -arrays["rewards"]])
    both["group_ids"] = jnp.tile(jnp.arange(len(arrays["rewards"])), 2)
    call = systems.get(entry.key)
    result = call(both, num_groups=len(arrays["rewards"]), coef=case.params["kl_coef"])[: len(arrays["rewards"])]
    case.assert_matches(result, jnp.where(arrays["mask"], case.result("advantages"), 0))


@exercise(("openrlhf", "compute_advantages_and_returns"))
def openrlhf(entry: Entry, case: Case) -> None:
    """The clip of the rewards, which the entries leave out, and the KL in the rewards of GAE and REINFORCE."""
    call, mask, params = call_of(entry), case.given("mask"), case.params
    low, high = params["reward_clip_range"]
    arrays = {name: case.given(name) for name in case.inputs} | {"group_ids": PAIRS["group_ids"]}
    more = options(entry, case) | {"coef": params["kl_coef"], "num_groups": PAIRS["num_groups"]}
    if call.function in ("gae", "reinforce_plus_plus_returns"):
        shaped = kljax.subtract_kl(jnp.clip(arrays["rewards"], low, high), arrays["kl"], mask, coef=params["kl_coef"])
        arrays |= {"rewards": shaped, "token_rewards": shaped}
    else:
        if call.arguments.get("num_groups") == 1:
            arrays["group_ids"], more["num_groups"] = jnp.zeros(len(mask), int), 1
        assert "--reward.clip_range" in entry.part
        baselined = run(dataclasses.replace(call, then=()), arrays, **more)
        if jnp.any(jnp.abs(baselined) > high):  # the part that the call leaves out, between its first two steps
            first = call.then[0]
            clipped = {**arrays, "rewards": jnp.clip(baselined, low, high)}
            call = dataclasses.replace(call, function=first.function, arguments=first.arguments, then=call.then[1:])
            arrays = clipped
    result = run(call, arrays, **more)
    advantages = result[0] if isinstance(result, tuple) else result
    returns = _before_whitening(call, arrays, more)
    case.assert_matches(advantages, jnp.where(mask, case.result("advantages"), 0))
    case.assert_matches(returns, jnp.where(mask, case.result("returns"), 0))


def _before_whitening(call: Call, arrays: dict[str, Any], more: dict[str, Any]) -> jax.Array:
    """The returns: what the call computes before its whitening."""
    steps = tuple(step for step in call.then if step.function != "masked_whiten")
    result = run(dataclasses.replace(call, then=steps), arrays, **more)
    return result[1] if isinstance(result, tuple) else result


@exercise(("trl", "advantages"), ("trl", "async_advantages"))
def trl(entry: Entry, case: Case) -> None:
    (name,) = case.inputs
    rewards, more = case.given(name), {}
    valid = ~jnp.isnan(rewards)  # a reward that is NaN does not count
    rewards = jnp.where(valid, rewards, 0)
    if call_of(entry).function == "gdpo_advantages":
        more = {"weights": jnp.array(case.params["reward_weights"])}
    elif rewards.ndim == 2:
        rewards, valid = rewards.sum(-1), valid.any(-1)
    groups = kljax.Groups(PAIRS["group_ids"], 3, valid)
    result = run(call_of(entry), {"rewards": rewards, "group_ids": groups}, **more)
    case.assert_matches(result, case.result("advantages"))


@exercise(("trl", "rloo_advantages"))
def trl_rloo(entry: Entry, case: Case) -> None:
    """The KL of the entry, or of the kind of another entry of the case, is in the rewards before the baseline."""
    rewards, beta = case.given("rewards"), case.params["beta"]
    if beta:
        arrays = {"log_probs": case.given("old_log_probs"), "ref_log_probs": case.given("ref_log_probs")}
        arrays |= {"mask": case.given("mask"), "scores": rewards}
        if entry.kind == "kl":
            per_token = kljax.estimate_kl(*list(arrays.values())[:3], **kljax.systems.arguments(entry.key))
            rewards = rewards - beta * per_token.sum(-1)
        else:
            shaped, _ = run(call_of(part("placement", entry, case)), arrays, coef=beta)
            rewards = shaped.sum(-1)
    advantages = run(call_of(part("advantage", entry, case)), {**PAIRS, "rewards": rewards}, num_groups=3)
    case.assert_matches(advantages, case.result("advantages"))


@exercise(("trinity", "StepWiseGRPOAdvantageFn"))
def step_wise(entry: Entry, case: Case) -> None:
    # Trajectories of two steps; the last one has the reward, and the advantage is given to both.
    mask = case.given("mask")
    tasks = kljax.Groups(case.given("prompt_ids"), 2, valid=jnp.arange(len(mask)) % 2 == 1)
    arrays = {"rewards": case.given("rewards"), "group_ids": tasks, "run_ids": case.given("run_ids"), "num_runs": 3}
    steps = systems.get(entry.key)(arrays, **options(entry, case))
    case.assert_matches(kljax.broadcast_to_tokens(steps, mask), case.result("advantages"))
