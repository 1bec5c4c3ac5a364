"""Losses that treat tokens alone are fused with the LM head, and change no number of an update."""

import dataclasses
import functools
from typing import Any, get_args

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import kljax
from tests import other_seeds, tiny
from tests.train.rl.test_objective import EVERYTHING, batch_of, loss_of
from train.config import plan
from train.config.algorithms import LOSSES, Scope
from train.config.plan import LOSS_ARRAYS, Plan, arrays_of
from train.config.schema import Config
from train.models.head import stored_head
from train.rl import objective

# Chunks and tiles that divide nothing.
TILE = "log_probs={tile: {tokens: 8, vocab: 100}, token_chunk: 5}"
OPTIONS = {"dro": "loss={type: dro, coef: 0.1}", "none": "loss.type=none"}
WIDEST = {
    "rec": "loss={type: rec, weight: gspo_importance_sampling}",
    "clip_cov": "loss={type: clip_cov, fraction: 0.5, lower: -100, upper: 100}",
}
LEVELS = get_args(kljax.typing.SurrogateLevel)


def loss_option(name: str) -> str:
    return OPTIONS.get(name, f"loss.type={name}")


def traced_scope(config: Config) -> Scope:
    """Moves the inputs of one token, and returns whose losses move with them."""
    signature = Plan.of(config).loss
    assert signature is not None
    function = functools.partial(getattr(kljax, signature.target.rpartition(":")[2]), **config.loss.options())
    function = jax.jit(functools.partial(function, num_groups=2) if "num_groups" in signature else function)
    rng, shape, token = other_seeds.example(0), (3, 5), (1, 2)
    shared = {"mask": np.ones(shape, bool), "key": other_seeds.example_key(0), "group_ids": np.array([0, 0, 1])}
    names = arrays_of(signature, LOSS_ARRAYS)
    drawn = [name for name in names if name not in shared]
    moves = np.zeros(shape, bool)
    for _ in range(30):
        arrays = {name: rng.normal(size=shape).astype(np.float32) for name in drawn}
        moved = {name: array.copy() for name, array in arrays.items()}
        for array in moved.values():
            array[token] += 3 * rng.normal()
        before, after = (
            function(**x, **{name: value for name, value in shared.items() if name in names}) for x in (arrays, moved)
        )
        moves |= np.asarray(before != after)
    others = moves.copy()
    others[token] = False
    assert moves[token]
    return "token" if not others.any() else "row" if not np.delete(others, token[0], axis=0).any() else "update"


LEVELS_OF = {name: LEVELS if loss.scope == "level" else (None,) for name, loss in LOSSES.items()}


@pytest.mark.parametrize(("name", "level"), [(name, level) for name, levels in LEVELS_OF.items() for level in levels])
def test_scope_of_a_loss_matches_its_function(name: str, level: str | None) -> None:
    """With the options that give a loss its widest scope."""
    config = tiny.config_of(WIDEST.get(name, loss_option(name)), *([f"loss.level={level}"] if level else []))
    assert Plan.of(config).scope == traced_scope(config)


def test_a_function_of_the_user_sees_whole_rows() -> None:
    config = tiny.config_of("loss.type=kljax.losses:ppo_clip_loss")
    assert not Plan.of(config).treats_tokens_alone


def fields_of(case: str) -> dict[str, Any]:
    """More fields of a batch, as scoring and corrections fill them in."""
    rng = np.random.default_rng(5)
    shape, width = batch_of().tokens.shape, tiny.model_of(tiny.config_of()).config.width
    selected = batch_of().completion_mask & jnp.asarray(rng.random(shape) < 0.7)
    return {
        "corrected": {"correction_weights": jnp.asarray(rng.uniform(size=shape), jnp.float32), "kept_mask": selected},
        "exact": {"ref_hidden": jnp.asarray(rng.normal(size=(*shape, width)), jnp.float32)},
        "kept tokens": {"fields": {"kept_ids": jnp.asarray(rng.integers(-1, 256, (*shape, 4)), jnp.int32)}},
        "own weights": {"term_weights": {"kl": kljax.token_weights(selected, mode="seq_mean_token_mean")}},
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
    unfused = dataclasses.replace(Plan.of(config), scope="row")
    assert Plan.of(config).treats_tokens_alone
    monkeypatch.setattr(plan, "_plan", lambda config: unfused)
    (wanted, others), expected = loss_of(config, batch, **options)
    # A loss near 0 is the rest of terms of either sign, whose sizes have a weighted mean near 1.
    np.testing.assert_allclose(loss, wanted, rtol=2e-6, atol=2.0**-23)
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
def test_choice_between_fused_and_unfused_programs(name: str, fused: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []
    loss_from_hidden = kljax.token_loss_from_hidden
    monkeypatch.setattr(
        kljax, "token_loss_from_hidden", lambda **given: calls.append(given) or loss_from_hidden(**given)
    )
    config = tiny.config_of(loss_option(name), TILE)
    function = objective.make_objective(Plan.of(config), tiny.model_of(config))
    trainable = {"params": tiny.host_params()}
    jax.eval_shape(function, trainable, None, batch_of(), objective.coefficients(config))
    assert [arguments["token_chunk"] for arguments in calls] == ([5] if fused else [])
