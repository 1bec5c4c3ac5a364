"""Edge cases: small divergences, poison under the mask, impossible tokens, targets out of range, no tokens."""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import kljax
from kljax import Head, Tile
from tests.kljax.calls import compiled, known_options, program
from tests.kljax.log_probs.oracle import KINDS, Arrays, Numbers, token_by_token
from tests.other_seeds import example

IMPLEMENTATIONS = ("tile", "reference")
TOKENS, WIDTH, VOCABULARY = 6, 4, 11
TILE = Tile(4, 4)


def divergence(kind: str) -> Callable[..., jax.Array]:
    if kind == "jsd":
        return kljax.jsd_from_hidden
    return functools.partial(kljax.kl_from_hidden, direction=kind)


def exact(hidden: Any, head: Any, ref_hidden: Any, ref_head: Any, kind: str) -> np.ndarray:
    """The divergence by its definition, in extended precision: a small one loses half of the digits of float64."""
    bias, tokens = np.zeros(head.shape[1]), hidden.shape[:-1]
    arrays = [np.asarray(x, np.longdouble) for x in (hidden, head, bias, ref_hidden, ref_head, bias)]
    selected = np.zeros((*tokens, head.shape[1]), bool)
    numbers = Numbers(np.zeros(tokens, int), np.ones(tokens, bool), np.ones(tokens), (0, 0), (1, 1), 0.5, selected)
    return token_by_token(Arrays(*arrays), numbers)[kind]


# ---- small divergences ----


def divergences(hidden: Any, head: Any, other: Any, tile: Tile | None = None) -> dict[tuple[str, str], jax.Array]:
    """Every kind by both implementations."""
    return {
        (kind, name): divergence(kind)(hidden, Head(head, tile=tile, implementation=name), other)
        for kind in KINDS
        for name in IMPLEMENTATIONS
    }


def test_small_divergences_keep_their_digits() -> None:
    # The head is the identity, so that the logits are the float32 numbers given and all error is that of the sums.
    rng = example(0)
    logits = rng.normal(size=(5, 37)).astype(np.float32)
    # Divergences of 1e-2, 1e-4, ... 1e-10 nats.
    steps = np.float32(10.0) ** -np.arange(1, 6, dtype=np.float32)
    other = logits + steps[:, None] * rng.normal(size=logits.shape).astype(np.float32)
    head = np.eye(37, dtype=np.float32)
    values = compiled(lambda *x: divergences(x[0], head, x[1], Tile(2, 10)), jnp.asarray(logits), jnp.asarray(other))
    for (kind, name), actual in values.items():
        expected = exact(logits, head, other, head, kind)
        assert (np.abs(np.log10(expected) - np.log10(steps**2)) < 1.2).all()
        assert actual.dtype == jnp.float32
        np.testing.assert_allclose(actual, expected, rtol=2e-6, err_msg=f"{kind}, {name}")


def test_small_divergences_through_a_head() -> None:
    # A logit has the error of a float32 sum, eps times its size; relative to the differences of 1e-3 that make a KL of
    # 1e-6 that is 1e-4. Written as sum p (log p - log q) it would be 1e-1.
    rng = np.random.default_rng(1)
    hidden, head = rng.normal(size=(8, 16)).astype(np.float32), rng.normal(size=(16, 53)).astype(np.float32) / 4
    other = hidden + np.float32(1e-3) * rng.normal(size=hidden.shape).astype(np.float32)
    values = compiled(lambda *x: divergences(x[0], head, x[1]), jnp.asarray(hidden), jnp.asarray(other))
    for (kind, name), actual in values.items():
        expected = exact(hidden, head, other, head, kind)
        assert (expected < 2e-6).all()
        np.testing.assert_allclose(actual, expected, rtol=1e-3, err_msg=f"{kind}, {name}")


@pytest.mark.parametrize("dtype", [jnp.bfloat16, pytest.param(jnp.float32, marks=pytest.mark.thorough)])
def test_policy_has_no_distance_to_itself(dtype: Any) -> None:
    rng = np.random.default_rng(2)
    hidden, head = jnp.asarray(3 * rng.normal(size=(7, 5)), dtype), jnp.asarray(rng.normal(size=(5, 23)), dtype)

    def run(hidden: Any, head: Any) -> list[Any]:
        def loss(weights: tuple[Any, Any], kind: str, own: bool, implementation: str) -> tuple[jax.Array, Any]:
            ref_head = jax.lax.stop_gradient(head) if own else None
            policy = Head(weights[1], softcap=5.0, tile=Tile(4, 10), implementation=implementation)
            other = jax.lax.stop_gradient(hidden)
            values = divergence(kind)(weights[0], policy, other, ref_head, temperature=0.7)
            return values.sum(), values

        points = [("reverse", True, "tile"), *((kind, False, name) for kind in KINDS for name in IMPLEMENTATIONS)]
        return [jax.grad(loss, has_aux=True)((hidden, head), *point) for point in points]

    for gradients, values in compiled(run, hidden, head):
        np.testing.assert_array_equal(values, 0)
        for gradient in gradients:
            assert np.abs(np.float64(gradient)).max() < 1e-6


def test_large_logits() -> None:
    # Logits up to 1e4 nats, distributions that hardly meet: nothing overflows, and the error is that of the logits.
    rng = np.random.default_rng(3)
    hidden, other = (np.float32(1e3 * rng.normal(size=(5, 12))) for _ in range(2))
    head = np.eye(12, dtype=np.float32)
    values = compiled(lambda *x: divergences(x[0], head, x[1], TILE), jnp.asarray(hidden), jnp.asarray(other))
    for (kind, name), actual in values.items():
        wanted = exact(hidden, head, other, head, kind)
        np.testing.assert_allclose(actual, wanted, rtol=1e-6, atol=1e-30, err_msg=f"{kind}, {name}")


# ---- under the mask ----

MASK = np.array([True, False, True, False, False, True])
POISON = {"nan": np.nan, "inf": np.inf, "-inf": -np.inf}


def problem() -> dict[str, np.ndarray]:
    rng = np.random.default_rng(4)
    draws = {
        "hidden": rng.normal(size=(TOKENS, WIDTH)),
        "head": rng.normal(size=(WIDTH, VOCABULARY)),
        "ref_hidden": rng.normal(size=(TOKENS, WIDTH)),
        "ref_head": rng.normal(size=(WIDTH, VOCABULARY)),
        "temperature": rng.uniform(0.7, 1.5, TOKENS),
    }
    return {name: np.asarray(x, np.float32) for name, x in draws.items()}


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_non_finite_values_under_the_mask_stay_out(implementation: str) -> None:
    # Also of the cotangents: what is made of a masked 0 may be infinite, as its logarithm is.
    targets = np.arange(TOKENS)

    def run(arrays: dict[str, Any], targets: Any, cotangents: Any) -> Any:
        common = {"mask": MASK, "temperature": arrays.pop("temperature")}

        def head(weights: Any) -> Head:
            return Head(weights, tile=TILE, implementation=implementation)

        def fields(given: dict[str, Any]) -> list[Any]:
            policy, reference = (given["hidden"], head(given["head"])), (given["ref_hidden"], given["ref_head"])
            options = {"entropy": True, "sum_squared_probs": True, "reference": reference, **common}
            stats = kljax.log_probs_from_hidden(*policy, targets, **options)
            alone = kljax.log_probs_from_hidden(*map(jax.lax.stop_gradient, policy), targets, **common)
            renormalised = kljax.renormalized_log_probs(*policy, targets, targets[:, None] + 1, **common)
            jsd = kljax.jsd_from_hidden(*policy, *reference, hidden_mask=MASK, temperature=common["temperature"])
            return [stats, jsd, alone, renormalised]

        def frozen(hidden: Any) -> jax.Array:
            return kljax.log_probs_from_hidden(hidden, head(arrays["head"]), targets, **common).log_prob.sum()

        out, pull = jax.vjp(fields, arrays)
        gradients = pull(jax.tree.map(lambda x: cotangents.astype(x.dtype), out))[0]
        return out, gradients, jax.grad(frozen)(arrays["hidden"])

    poisoned_program = jax.jit(run, compiler_options=known_options())
    ones = np.ones(TOKENS, np.float32)
    clean = jax.device_get(poisoned_program(problem(), targets, ones))
    for leaf in jax.tree.leaves((clean[0], clean[1]["hidden"], clean[1]["ref_hidden"], clean[2])):
        assert np.isfinite(leaf).all()
        assert leaf[MASK].all()
        assert not leaf[~MASK].any()
    for poison in POISON.values():
        arrays = problem()
        for name in ("hidden", "ref_hidden", "temperature"):
            arrays[name][~MASK] = poison
        bad_targets, bad_cotangents = np.where(MASK, targets, -(10**6)), np.where(MASK, ones, np.float32(poison))
        poisoned = jax.device_get(poisoned_program(arrays, bad_targets, bad_cotangents))
        jax.tree.map(np.testing.assert_array_equal, poisoned, clean)


# ---- impossible tokens ----


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_tokens_impossible_for_both_add_nothing(implementation: str) -> None:
    # A bias of -infinity takes a token out of the vocabulary of policy and reference: all else is as without it.
    arrays = problem()
    del arrays["temperature"]
    gone = np.array([0, 5, 10])
    left = np.delete(np.arange(VOCABULARY), gone)
    bias = np.where(np.isin(np.arange(VOCABULARY), gone), np.float32(-np.inf), np.float32(0))
    targets = np.array([1, 2, 3, 4, 6, 7])

    def run(arrays: dict[str, Any], bias: Any, targets: Any, kept_ids: Any) -> Any:
        def fields(arrays: dict[str, Any]) -> tuple[jax.Array, Any]:
            head = Head(arrays["head"], bias=bias, tile=TILE, implementation=implementation)
            policy, reference = (arrays["hidden"], head), (arrays["ref_hidden"], arrays["ref_head"])
            options = {"entropy": True, "sum_squared_probs": True, "reference": reference}
            out: list[Any] = [
                kljax.log_probs_from_hidden(*policy, targets, **options),
                kljax.kl_from_hidden(*policy, *reference, direction="forward"),
                kljax.jsd_from_hidden(*policy, *reference),
                kljax.renormalized_log_probs(*policy, targets, kept_ids),
            ]
            return sum(x.sum() for x in jax.tree.leaves(out)), out  # type: ignore[return-value]

        return jax.grad(fields, has_aux=True)(arrays)

    def log_probs(arrays: dict[str, Any], bias: Any, targets: Any) -> list[Any]:
        head = Head(arrays["head"], bias=bias, tile=TILE, implementation=implementation)
        renormalised = kljax.renormalized_log_probs(arrays["hidden"], head, targets, targets[:, None])
        return [kljax.log_probs_from_hidden(arrays["hidden"], head, targets).log_prob, renormalised.log_kept_mass]

    # Of the kept tokens 0 and 1, the first is impossible.
    kept_ids = np.broadcast_to(np.arange(2), (TOKENS, 2))
    grads, out = compiled(run, arrays, bias, targets, kept_ids)
    without = {name: x[:, left] if "head" in name else x for name, x in arrays.items()}
    expected_grads, expected = compiled(run, without, bias[left], np.searchsorted(left, targets), kept_ids[:, 1:] - 1)
    close = functools.partial(np.testing.assert_allclose, rtol=2e-6, atol=2e-6)
    jax.tree.map(close, out, expected)
    for name in arrays:
        close(grads[name][:, left] if "head" in name else grads[name], expected_grads[name])
        assert "head" not in name or not grads[name][:, gone].any()
    for impossible in compiled(log_probs, arrays, bias, np.full(TOKENS, 5)):
        np.testing.assert_array_equal(impossible, -np.inf)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_divergences_with_tokens_impossible_for_one(implementation: str) -> None:
    rng = np.random.default_rng(5)
    hidden = jnp.asarray(np.append(rng.normal(size=(3, 1)), np.ones((3, 1)), 1), jnp.float32)
    open_head = jnp.asarray(rng.normal(size=(2, 9)), jnp.float32)
    closed = open_head.at[1, 4].set(-jnp.inf).at[:, 0].mul(-1)

    def run(hidden: Any, head: Any, ref_head: Any) -> list[Any]:
        def loss(hidden: Any, kind: str) -> tuple[jax.Array, Any]:
            policy = Head(head, tile=TILE, implementation=implementation)
            values = divergence(kind)(hidden, policy, hidden, ref_head)
            return values.sum(), values

        return [jax.grad(loss, has_aux=True)(hidden, kind) for kind in KINDS]

    both = program(run, hidden, open_head, closed)
    values = [v for _, v in both(hidden, open_head, closed)]
    np.testing.assert_array_equal(values[0], np.inf)
    assert np.isfinite(values[1]).all()
    assert np.isfinite(values[2]).all()
    swapped = [v for _, v in both(hidden, closed, open_head)]
    np.testing.assert_array_equal(swapped[1], np.inf)
    np.testing.assert_allclose(swapped[0], values[1], rtol=1e-6)
    np.testing.assert_allclose(swapped[2], values[2], rtol=1e-6)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_an_infinite_kl_has_no_gradient(implementation: str) -> None:
    rng = np.random.default_rng(6)
    hidden = jnp.asarray(np.append(rng.normal(size=(3, 1)), np.ones((3, 1)), 1), jnp.float32)
    head = jnp.asarray(rng.normal(size=(2, 9)), jnp.float32)
    closed = head.at[1, 4].set(-jnp.inf)

    def run(hidden: Any, head: Any) -> Any:
        def loss(hidden: Any, head: Any) -> jax.Array:
            other = jax.lax.stop_gradient(hidden)
            head = Head(head, tile=TILE, implementation=implementation)
            return kljax.kl_from_hidden(hidden, head, other, closed).sum()

        return jax.grad(loss, (0, 1))(hidden, head)

    for gradient in compiled(run, hidden, head):
        np.testing.assert_array_equal(gradient, 0)


# ---- targets and sizes at the edge ----


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_targets_outside_are_clamped_to_real_columns(implementation: str) -> None:
    arrays = problem()
    head = Head(arrays["head"], vocab_size=VOCABULARY - 2, tile=TILE, implementation=implementation)

    def run(targets: Any) -> jax.Array:
        return kljax.log_probs_from_hidden(arrays["hidden"], head, targets).log_prob

    outside = jnp.asarray([-1, -100, VOCABULARY - 2, VOCABULARY - 1, VOCABULARY, 10**9])
    inside = jnp.asarray([0, 0, *[VOCABULARY - 3] * 4])
    actual, expected = compiled(lambda *x: [run(t) for t in x], outside, inside)
    np.testing.assert_array_equal(actual, expected)


@pytest.mark.parametrize("shape", [(0,), (2, 0), ()])
def test_no_tokens_and_a_single_one(shape: tuple[int, ...]) -> None:
    hidden, head = jnp.ones((*shape, WIDTH), jnp.float32), problem()["head"]
    targets, mask = jnp.zeros(shape, int), jnp.ones(shape, bool)

    def run(hidden: Any, head: Any) -> Any:
        def loss(hidden: Any, head: Any, given: Any, implementation: str) -> tuple[jax.Array, Any]:
            head = Head(head, tile=TILE, implementation=implementation)
            stats = kljax.log_probs_from_hidden(hidden, head, targets, mask=given, entropy=True)
            return stats.log_prob.sum() + stats.entropy.sum(), stats

        grad = jax.grad(loss, (0, 1), has_aux=True)
        return [grad(hidden, head, arguments, name) for arguments in (None, mask) for name in IMPLEMENTATIONS]

    results = compiled(run, hidden, head)
    for (of_hidden, of_head), stats in results:
        assert stats.log_prob.shape == stats.entropy.shape == shape
        assert (of_hidden.shape, of_head.shape) == (hidden.shape, head.shape)
        np.testing.assert_allclose(of_head, results[0][0][1], rtol=1e-5, atol=1e-6)
        if 0 in shape:
            assert not of_head.any()
