"""Losses that treat tokens alone are fused with the LM head, and change no number of an update."""

import dataclasses
from typing import Any, get_args

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import kljax
from tests import tiny
from tests.train.rl.test_objective import EVERYTHING, batch_of, loss_of
from train.config import plan
from train.config.algorithms import LOSSES
from train.config.plan import Plan
from train.rl import objective
from train.rl.policy import stored_head

# Chunks and tiles that divide nothing.
TILE = "log_probs={tile: {tokens: 8, vocab: 100}, token_chunk: 5}"
ALONE = (
    *("ppo", "cispo", "sapo", "dppo", "sppo", "dro", "topr", "opmd", "gpg", "reinforce"),
    *("importance_sampling", "cross_entropy", "none"),
)
OPTIONS = {"dro": "loss={type: dro, coef: 0.1}", "none": "loss.type=none"}
LEVELS = get_args(kljax.typing.SurrogateLevel)


def loss_option(name: str) -> str:
    return OPTIONS.get(name, f"loss.type={name}")


@pytest.mark.parametrize("name", [*LOSSES, "none"])
def test_losses_that_treat_tokens_alone_are_known(name: str) -> None:
    config = tiny.config_of(loss_option(name), "kl.loss.coef=0.1")
    assert Plan.of(config).treats_tokens_alone == (name in ALONE)


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("name", ["ppo", "cispo", "sapo"])
def test_a_ratio_of_a_sequence_is_not_of_a_token(name: str, level: str) -> None:
    config = tiny.config_of(loss_option(name), f"loss.level={level}")
    assert Plan.of(config).treats_tokens_alone == (level == "token")


def test_a_function_of_the_user_sees_whole_rows() -> None:
    config = tiny.config_of("loss.type=kljax.losses:ppo_clip_loss")
    assert not Plan.of(config).treats_tokens_alone


def fields_of(case: str) -> dict[str, Any]:
    """More fields of a batch, as scoring and corrections fill them in."""
    rng = np.random.default_rng(5)
    shape, width = batch_of().tokens.shape, tiny.model_of(tiny.config_of()).config.width
    kept = batch_of().completion_mask & jnp.asarray(rng.random(shape) < 0.7)
    return {
        "corrected": {"correction_weights": jnp.asarray(rng.uniform(size=shape), jnp.float32), "kept_mask": kept},
        "exact": {"ref_hidden": jnp.asarray(rng.normal(size=(*shape, width)), jnp.float32)},
        "kept tokens": {"kept_ids": jnp.asarray(rng.integers(-1, 256, (*shape, 4)), jnp.int32)},
        "own weights": {"kl_token_weights": kljax.token_weights(kept, mode="seq_mean_token_mean")},
        "first update": {"old_log_probs": None},
    }.get(case, {})


CASES: dict[str, tuple[str, ...]] = {
    "everything": EVERYTHING,
    "exact": ("kl.loss={coef: 0.2, estimator: exact}", "loss.entropy_coef=0.05", "loss.type=cispo"),
    "corrected": ("kl.loss={coef: 0.2, gradient: k2}", "loss.type=dppo"),
    "kept tokens": ("loss.type=sapo", "kl.rollout.coef=0.1"),
    "own weights": ("kl.loss={coef: 0.2, aggregation: seq_mean_token_mean}", "loss.type=reinforce"),
    "first update": ("kl.loss={coef: 0.2, importance_corrected: true}", "loss.type=importance_sampling"),
    "steered": ("kl.loss={coef: 0.2, controller: {type: pi, target: 0.1, kp: 0.1, ki: 0.1}}", "loss.type=none"),
}
OF_ONE_TERM = {name: (loss_option(name),) for name in ("sppo", "dro", "topr", "opmd", "gpg", "cross_entropy")}
MARKED = [*CASES, *(pytest.param(name, marks=pytest.mark.thorough) for name in OF_ONE_TERM)]


@pytest.mark.parametrize("case", MARKED)
def test_a_fused_loss_is_the_unfused_one(case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its gradient goes through the decoder in one case, and to hidden states and head in the others."""
    config = tiny.config_of(*(CASES | OF_ONE_TERM)[case], TILE)
    batch = dataclasses.replace(batch_of(), **fields_of(case))
    options = {"with_gradient": True, "decoder": case == "everything"}
    if case == "exact":
        options["ref_head"] = kljax.Head(jnp.asarray(objective_head()))
    (loss, metrics), gradient = loss_of(config, batch, **options)
    unfused = dataclasses.replace(Plan.of(config), treats_tokens_alone=False)
    assert Plan.of(config).treats_tokens_alone
    monkeypatch.setattr(plan, "_plan", lambda config: unfused)
    (wanted, others), expected = loss_of(config, batch, **options)
    np.testing.assert_allclose(loss, wanted, rtol=2e-6)
    assert metrics.keys() == others.keys()
    for name, metric in metrics.items():
        np.testing.assert_allclose(metric.value(), others[name].value(), rtol=5e-6, atol=1e-7, err_msg=name)
    largest = max(float(jnp.abs(leaf).max()) for leaf in jax.tree.leaves(expected))
    assert largest > 1e-3
    for leaf, other in zip(jax.tree.leaves(gradient), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(leaf, other, rtol=1e-5, atol=5e-6 * largest)


def objective_head() -> np.ndarray:
    """The LM head `[D, V]` of a reference."""
    model, params = tiny.model_of(tiny.config_of()), tiny.moved(tiny.host_params(), 0.05)
    weights = np.asarray(stored_head(model, params))
    return weights.T if model.config.tie_embeddings else weights


@pytest.mark.parametrize(("name", "fused"), [("ppo", True), ("gspo", False)])
def test_which_program_is_compiled(name: str, fused: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []
    loss_from_hidden = kljax.token_loss_from_hidden
    monkeypatch.setattr(
        kljax, "token_loss_from_hidden", lambda **given: calls.append(given) or loss_from_hidden(**given)
    )
    config = tiny.config_of(loss_option(name), TILE)
    function = objective.make_objective(config, tiny.model_of(config))
    trainable = {"params": tiny.host_params()}
    jax.eval_shape(function, trainable, None, batch_of(), objective.coefficients(config))
    assert [given["token_chunk"] for given in calls] == ([5] if fused else [])
