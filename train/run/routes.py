"""Metrics and checks of the routes of a step: equality is asserted, as a lost layer hardly shows in a log-prob."""

import math
from collections.abc import Mapping
from typing import Any

from train.config.errors import GuardError
from train.rl.kl_metrics import AGREEMENT, AGREEMENT_AFTER, AGREEMENT_BEFORE, COMPARED
from train.rl.routing import LOAD, ExpertLoad

NEIGHBOURS = {AGREEMENT_BEFORE: ("before", "later"), AGREEMENT_AFTER: ("after", "earlier")}
LEAST_AGREEMENT = 0.5
"""Share of tokens for which the router has to choose a neighbour's routes to call them shifted."""
BEYOND_CHANCE = 4.0
"""Standard deviations that two shares have to differ by: chance does so once in 30,000 steps."""
UNRELATED = 2.0
"""The own routes agree no more than those of another token if they are not ahead by as many standard deviations."""


def flips_by_lag(values: Mapping[str, float]) -> dict[str, float]:
    """Returns the flips of a step by the name of its lag; none without flips, or without one lag of all tokens."""
    lag = values.get("rollout_lag")
    if "routing_flips" not in values or lag is None or lag != values["rollout_lag_max"]:
        return {}
    return {f"routing_flips_lag_{lag:.0f}": values["routing_flips"]}


def loads_by_expert(totals: Mapping[str, Any]) -> dict[str, float | list[int]]:
    """Returns by layer the least load of a step, and the tokens of all experts, from its metrics on the host."""
    loads = {name.removeprefix(LOAD): load for name, load in totals.items() if isinstance(load, ExpertLoad)}
    least = {f"router_least_load_layer_{layer}": float(load.least()) for layer, load in loads.items()}
    return least | {f"router_tokens_layer_{layer}": load.tokens.tolist() for layer, load in loads.items()}


def verify_routes(values: Mapping[str, float], step: int) -> None:
    """Checks the metrics of a step with `routing.verify`.

    Raises:
      GuardError: no route was recorded, a layer used other experts than the recorded ones, or the router chooses the
        recorded routes of the token before or after more often than the routes of the token, or none of them.
    """
    if values.get("routing_missing", 1.0) == 1:
        raise GuardError(
            f"step {step}: routing.verify: no routes were recorded; use a source that records them, or set it to false"
        )
    prefix = "routing_lost_layer_"
    lost = {name.removeprefix(prefix): x for name, x in values.items() if name.startswith(prefix) and x > 0}
    if lost:
        layers = ", ".join(f"layer {layer}: {share:.3g} of the tokens" for layer, share in lost.items())
        raise GuardError(
            f"step {step}: routing.verify: the update used other experts than the recorded ones ({layers}); the step "
            "is not saved"
        )
    own = values[AGREEMENT]
    count = values[COMPARED]
    for name, (neighbour, direction) in NEIGHBOURS.items():
        share = values[name]
        if share >= LEAST_AGREEMENT and deviations(share, own, count) > BEYOND_CHANCE:
            raise GuardError(
                f"step {step}: routing.verify: routed_experts are shifted by one token: the router chooses the "
                f"experts of the token {neighbour} in {share:.3g} of the cases, its own in {own:.3g}; "
                f"record them one token {direction}"
            )
    others = max(values[name] for name in NEIGHBOURS)
    is_rare = 0.5 - own > BEYOND_CHANCE * 0.5 / math.sqrt(max(count, 1.0))
    if is_rare and deviations(own, others, count) < UNRELATED:
        raise GuardError(
            f"step {step}: routing.verify: the router chooses the recorded experts in {own:.3g} of the cases, those of "
            f"a token beside it in {others:.3g}: they are routes of other layers, of other rows or of another model"
        )


def deviations(first: float, second: float, count: float) -> float:
    """Returns by how many standard deviations one share of `count` tokens is above another, if both are equal."""
    mean = (first + second) / 2
    variance = 2 * mean * (1 - mean) / max(count, 1.0)
    return (first - second) / math.sqrt(variance) if variance else 0.0
