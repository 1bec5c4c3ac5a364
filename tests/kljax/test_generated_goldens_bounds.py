"""Numbers that a clamp decides, and the defaults of verl and Trinity: calls of `kljax.systems` as they stand."""

import dataclasses
from collections.abc import Callable, Iterator

import chex
import jax
import jax.numpy as jnp
import pytest

import kljax
from kljax.systems import Call, Entry
from tests.goldens import cases, compare
from tests.goldens.plan import REACHES_BOUND, RELEASE_DEFAULTS
from tests.kljax.systems import EXERCISES, matches

LOSSES = ("vanilla", "dppo_tv", "dppo_kl", "gspo", "sapo", "cispo")
ROW_MEAN, TOKEN_MEAN = compare.VERL["seq-mean-token-mean"], compare.VERL["token-mean"]
# The argument of each row that the cases of its bound reach.
CLAMP = {**dict.fromkeys(LOSSES, "log_ratio_clip"), "gspo": "max_log_ratio"}


def arrays_of(case: cases.Case) -> dict[str, jax.Array]:
    names = ("log_probs", "old_log_probs", "advantages", "mask")
    return dict(zip(names, compare.policy(case), strict=True))


@cases.parametrize(
    *(("verl", f"compute_policy_loss_{name}") for name in (*LOSSES, "geo_mean")),
    note=RELEASE_DEFAULTS,
)
def test_releases_have_these_defaults(case: cases.Case) -> None:
    # Nothing is overridden: every number of the call is the table's.
    name, arrays = case.params["name"], arrays_of(case)
    loss, mask = kljax.systems.get(f"verl/{name}"), arrays["mask"]

    def per_token(log_probs: jax.Array) -> jax.Array:
        return loss({**arrays, "log_probs": log_probs})

    if name == "geo_mean":  # verl's epsilon in the mean of a row's advantages too
        lengths = mask.sum(-1, keepdims=True).astype(jnp.float64)
        case.assert_value_and_grad(
            lambda lp: compare.reduced(per_token(lp) * lengths / (lengths + 1e-8), mask, compare.ROW_MEAN), "log_probs"
        )
        return
    compare.assert_loss(case, per_token, ROW_MEAN if name == "sapo" else TOKEN_MEAN)


TRINITY = {"PPOPolicy": "ppo", "CISPOPolicy": "cispo", "SAPOPolicy": "sapo", "TOPRPolicy": "topr"}
TRINITY |= {"OPMDPolicy": "opmd", "sPPOPolicy": "sppo", "GSPO": "gspo"}


@cases.parametrize(
    *(("trinity", f"{name}LossFn") for name in TRINITY),
    note=RELEASE_DEFAULTS,
)
def test_default_args_of_trinity(case: cases.Case) -> None:
    names = ("log_probs", "old_log_probs", "advantages", "mask")
    arrays = {name: case.given(name) for name in names if name in case.inputs}
    name = TRINITY[case.function.removesuffix("LossFn")]
    loss = kljax.systems.get(f"trinity/{name}", kind="policy_loss")
    reduction = compare.TRINITY[case.params["loss_agg_mode"]]
    compare.assert_loss(case, lambda lp: loss({**arrays, "log_probs": lp}), reduction)


@cases.parametrize(*(("verl", f"compute_policy_loss_{name}") for name in LOSSES), note=REACHES_BOUND)
def test_clamps_of_the_policy_losses(case: cases.Case) -> None:
    name, arrays = case.params["name"], arrays_of(case)
    far = case.params.get("clip_ratio_c", case.params.get("clip_ratio_high"))
    argument = {"vanilla": "dual_clip", "dppo_tv": "max_ratio", "dppo_kl": "max_ratio", "cispo": "clip_high"}.get(name)
    loss, mask, arguments = kljax.systems.get(f"verl/{name}"), arrays["mask"], {argument: far} if argument else {}

    def per_token(log_probs: jax.Array, **changed: float | None) -> jax.Array:
        return loss({**arrays, "log_probs": log_probs}, **arguments, **changed)

    compare.assert_loss(case, per_token, ROW_MEAN if name == "sapo" else TOKEN_MEAN)
    # Without the clamp it is another number: the case does reach it. SAPO's gate is 1 long before.
    unclamped = per_token(arrays["log_probs"], **{CLAMP[name]: None})
    if name != "sapo":
        assert jnp.abs(unclamped - per_token(arrays["log_probs"])).max() > 1
    if name != "gspo":
        clamp = loss.arguments["log_ratio_clip"]
        kl = kljax.ppo_kl(arrays["log_probs"], arrays["old_log_probs"], mask, log_ratio_clip=clamp)
        case.assert_matches(compare.mean(kl, mask), case.result("metric_ppo_kl"))


@cases.parametrize(("verl", "compute_rollout_correction_weights"), note=REACHES_BOUND)
def test_clamps_of_the_importance_weights(case: cases.Case) -> None:
    arrays = {"sampling_log_probs": case.given("rollout_log_probs")}
    arrays |= {name: case.given(name) for name in ("log_probs", "mask")}
    weights = kljax.systems.get(f"verl/rollout_is={case.params['rollout_is']}")
    result = weights(arrays, upper=case.params["rollout_is_threshold"])
    case.assert_matches(result, case.result("weights"))
    assert result.max() == pytest.approx(jnp.exp(20.0))


@cases.parametrize(("verl", "compute_offpolicy_metrics"), note=REACHES_BOUND)
def test_clamps_of_the_chi_squared_metrics(case: cases.Case) -> None:
    arrays = {"sampling_log_probs": case.given("rollout_log_probs")}
    arrays |= {name: case.given(name) for name in ("log_probs", "mask")}
    number = arrays["mask"].sum().astype(jnp.float64)
    token = kljax.systems.get("verl/rollout_corr/chi2_token")(arrays).value()
    case.assert_matches((token + 1) * number / (number + 1e-8) - 1, case.result("chi2_token"))
    sequence = kljax.systems.get("verl/rollout_corr/chi2_seq")
    case.assert_matches(sequence(arrays).value(), case.result("chi2_seq"))
    assert sequence(arrays, log_ratio_clip=None).value() > 1.01 * sequence(arrays).value()


BOUNDED = (
    ("trinity", "PPOPolicyLossFn"),
    ("verl", "compute_policy_loss_bypass_mode"),
    ("verl", "compute_rollout_rejection_mask"),
    ("skyrl", "ppo_policy_loss"),
    ("skyrl", "gspo_policy_loss"),
    ("skyrl", "compute_policy_loss_cispo"),
    ("skyrl", "dppo_policy_loss"),
    ("skyrl", "compute_off_policy_correction"),
    ("trl", "add_tail_bucket"),
    ("trl", "apply_importance_sampling_clipping"),
)
CLAMPS = ("log_ratio_clip", "max_log_ratio", "min_mass")


def other_clamps(call: Call) -> Iterator[tuple[Call, Call]]:
    """For each clamp of a call: the call with a smaller and with a larger one."""
    for name in CLAMPS:
        if name in call.arguments:
            value = call.arguments[name]
            low, high = (dataclasses.replace(call, arguments={**call.arguments, name: value * f}) for f in (0.95, 1.05))
            yield low, high
    for i, inner in enumerate(call.times):
        before, after = call.times[:i], call.times[i + 1 :]
        for low, high in other_clamps(inner):
            yield (
                dataclasses.replace(call, times=(*before, low, *after)),
                dataclasses.replace(call, times=(*before, high, *after)),
            )


def fails(exercise: Callable[[Entry, cases.Case], None], entry: Entry, case: cases.Case) -> bool:
    try:
        exercise(entry, case)
    except AssertionError:
        return True
    return False


@cases.parametrize(*BOUNDED, note=REACHES_BOUND)
def test_clamps_of_the_rows(case: cases.Case) -> None:
    exercise = EXERCISES[case.system, case.function]
    rows = [
        entry
        for entry in kljax.systems.entries(system=case.system)
        if entry.call and any(matches(golden, case) for golden in entry.goldens)
    ]
    clamped = [(entry, pair) for entry in rows for pair in other_clamps(entry.call)]
    assert clamped
    for entry in rows:
        exercise(entry, case)
    # The case tells each clamp from a smaller or from a larger one.
    for entry, pair in clamped:
        assert any(fails(exercise, dataclasses.replace(entry, call=call), case) for call in pair), entry.key


def test_every_bound_and_default_is_compared() -> None:
    assert {case.id for case in cases.all_cases() if case.note in (REACHES_BOUND, RELEASE_DEFAULTS)} == cases.CLAIMED


def test_the_cap_of_gspo_ends_its_gradient() -> None:
    # Beyond exp(10) verl's value stays and its gradient is 0, for a row whose advantage is negative.
    loss = kljax.systems.get("verl/gspo")
    arrays = {"old_log_probs": jnp.full((1, 2), -13.0), "advantages": -jnp.ones((1, 2)), "mask": jnp.ones((1, 2), bool)}
    value, gradient = jax.value_and_grad(lambda lp: loss({**arrays, "log_probs": lp}).sum())(jnp.full((1, 2), -1.0))
    chex.assert_trees_all_close(value, 2 * jnp.exp(10.0), rtol=1e-5)
    chex.assert_trees_all_equal(gradient, jnp.zeros((1, 2)))
