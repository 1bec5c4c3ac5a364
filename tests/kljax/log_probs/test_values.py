"""Statistics from hidden states in float64: gradients by differences, types, whole sequences, kept tokens."""

import itertools
from typing import Any

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import kljax
from kljax import Head, Tile
from tests.kljax.calls import compiled, program

# Sizes that divide nothing.
ROWS, LENGTH, WIDTH, VOCABULARY = 3, 5, 7, 11
IMPLEMENTATIONS = ("tile", "reference")


def draw(dtype: Any = jnp.float64) -> tuple[jax.Array, jax.Array, jax.Array]:
    rng = np.random.default_rng(0)
    hidden = jnp.asarray(rng.normal(size=(ROWS, LENGTH, WIDTH)), dtype)
    head = jnp.asarray(rng.normal(size=(WIDTH, VOCABULARY)), dtype)
    return hidden, head, jnp.asarray(rng.integers(0, VOCABULARY, (ROWS, LENGTH)))


def log_softmax(hidden: Any, head: Any, temperature: float = 1.0) -> np.ndarray:
    """`[..., V]` log-probs by NumPy, in float64."""
    z = np.asarray(hidden, np.float64) @ np.asarray(head, np.float64) / temperature
    z = z - z.max(-1, keepdims=True)
    return z - np.log(np.exp(z).sum(-1, keepdims=True))


def test_unrequested_fields_are_none() -> None:
    hidden, head, targets = draw()

    def run(hidden: Any) -> Any:
        options = ({}, {"entropy": True}, {"sum_squared_probs": True}, {"reference": (hidden, None)})
        return [kljax.log_probs_from_hidden(hidden, head, targets, **arguments) for arguments in options]

    results = compiled(run, hidden)
    for stats, name in zip(results, ("log_prob", "entropy", "sum_squared_probs", "kl"), strict=True):
        arguments = {field for field, value in vars(stats).items() if value is not None}
        assert arguments == {"log_prob", "logsumexp", name}
        chex.assert_trees_all_close(stats.log_prob, results[0].log_prob, rtol=1e-13)


def test_gradients_by_central_differences() -> None:
    hidden, head, targets = draw()

    def total(hidden: jax.Array, head: jax.Array) -> jax.Array:
        stats = kljax.log_probs_from_hidden(
            hidden, Head(head, softcap=2.0), targets, temperature=0.7, entropy=True, sum_squared_probs=True
        )
        renormalised = kljax.renormalized_log_probs(hidden, head, targets, jnp.stack([targets // 2, targets - 1], -1))
        parts = stats.log_prob + 0.3 * stats.entropy + 0.1 * stats.logsumexp + 0.7 * stats.sum_squared_probs
        return (parts + 0.2 * renormalised.log_prob + 0.9 * renormalised.log_kept_mass).sum()

    value_and_grad = program(jax.value_and_grad(total, (0, 1)), hidden, head)
    grads = value_and_grad(hidden, head)[1]
    for index, (array, at) in enumerate([(hidden, (1, 2, 3)), (head, (4, 5))]):
        step = jnp.zeros_like(array).at[at].set(1e-6)
        moved = [[hidden, head], [hidden, head]]
        moved[0][index], moved[1][index] = array + step, array - step
        slope = (value_and_grad(*moved[0])[0] - value_and_grad(*moved[1])[0]) / 2e-6
        chex.assert_trees_all_close(grads[index][at], slope, rtol=1e-7, atol=1e-8)


def test_gradient_to_a_reference_with_a_softcap() -> None:
    hidden, head, targets = draw()
    ref_hidden = hidden[::-1]

    def total(ref_hidden: jax.Array) -> jax.Array:
        reference = kljax.ReferenceStates(ref_hidden, Head(head, softcap=2.0), "reverse")
        return kljax.log_probs_from_hidden(hidden, head, targets, reference=reference).kl.sum()

    def dense(ref_hidden: jax.Array) -> jax.Array:
        log_p = jax.nn.log_softmax(hidden @ head)
        log_q = jax.nn.log_softmax(2.0 * jnp.tanh(ref_hidden @ head / 2.0))
        return (jnp.exp(log_p) * (log_p - log_q)).sum()

    chex.assert_trees_all_close(compiled(jax.grad(total), ref_hidden), jax.grad(dense)(ref_hidden), rtol=1e-10)


def test_log_prob_gradient_is_one_hot_minus_softmax() -> None:
    logits = jnp.asarray([[0.3, -1.0, 2.0]])
    grad = compiled(
        jax.grad(lambda h: kljax.log_probs_from_hidden(h, jnp.eye(3), jnp.array([2])).log_prob.sum()), logits
    )
    chex.assert_trees_all_close(grad, jnp.array([[0.0, 0.0, 1.0]]) - jax.nn.softmax(logits), rtol=1e-12)


@pytest.mark.float16
def test_results_are_float32_unless_an_input_is_float64() -> None:
    hidden, head, targets = draw()
    dtypes = (jnp.bfloat16, jnp.float16, jnp.float32)

    def run(hidden: Any, head: Any) -> list[Any]:
        narrow = [
            kljax.log_probs_from_hidden(hidden.astype(dtype), head.astype(dtype), targets, entropy=True)
            for dtype in dtypes
        ]
        return [*narrow, kljax.log_probs_from_hidden(hidden.astype(jnp.bfloat16), head, targets)]

    *narrow, mixed = compiled(run, hidden, head)
    assert mixed.log_prob.dtype == jnp.float64
    for stats, dtype in zip(narrow, dtypes, strict=True):
        assert {x.dtype for x in jax.tree.leaves(stats)} == {jnp.dtype(jnp.float32)}
        log_probs = log_softmax(hidden.astype(dtype), head.astype(dtype))
        expected = np.take_along_axis(log_probs, np.asarray(targets)[..., None], -1)[..., 0]
        np.testing.assert_allclose(stats.log_prob, expected, rtol=2e-6, atol=2e-6)
        np.testing.assert_allclose(stats.entropy, -(np.exp(log_probs) * log_probs).sum(-1), rtol=2e-6, atol=2e-6)


def test_an_impossible_token_adds_nothing_to_the_entropy() -> None:
    # A head that gives one token a logit of -infinity: probability 0, and 0 * -inf is not NaN.
    def run(hidden: Any, head: Any) -> Any:
        possible = kljax.log_probs_from_hidden(hidden, head, jnp.array([0]), entropy=True)
        impossible = kljax.log_probs_from_hidden(hidden, head, jnp.array([2]))
        grad = jax.grad(lambda z: kljax.log_probs_from_hidden(hidden, z, jnp.array([0]), entropy=True).entropy.sum())
        return possible, impossible.log_prob, grad(head + jnp.array([[0.0, 1.0, 0.0]]))

    stats, impossible, grad = compiled(run, jnp.ones((1, 1)), jnp.asarray([[0.0, 0.0, -jnp.inf]]))
    chex.assert_trees_all_close((stats.log_prob, stats.entropy), (-np.log([2.0]), np.log([2.0])))
    np.testing.assert_array_equal(impossible, [-np.inf])
    chex.assert_tree_all_finite(grad)


def test_large_logits_do_not_overflow() -> None:
    hidden, head = jnp.asarray([[1.0]], jnp.float32), jnp.asarray([[1e4, 0.0]], jnp.float32)
    stats = compiled(lambda *x: kljax.log_probs_from_hidden(*x, jnp.array([0]), entropy=True), hidden, head)
    chex.assert_trees_all_equal((stats.log_prob, stats.entropy), (np.float32([0.0]), np.float32([0.0])))


def test_targets_outside_are_clamped_and_stay_finite() -> None:
    hidden, head, targets = draw()
    log_prob = program(lambda t: kljax.log_probs_from_hidden(hidden, head, t).log_prob, targets)
    for target in (-1, -100, VOCABULARY, 10**6):
        inside = jnp.full_like(targets, min(max(target, 0), VOCABULARY - 1))
        chex.assert_trees_all_equal(log_prob(jnp.full_like(targets, target)), log_prob(inside))
        with pytest.raises(ValueError, match=f"targets: got {target}, expected ids in"):
            kljax.log_probs_from_hidden(hidden, head, jnp.full_like(targets, target))


def test_leading_axes_vmap_and_traced_temperature() -> None:
    hidden, head, targets = draw()

    def run(temperature: Any) -> list[Any]:
        def stats(hidden: Any, targets: Any, temperature: Any) -> Any:
            return kljax.log_probs_from_hidden(hidden, head, targets, temperature=temperature, entropy=True)

        mapped = jax.vmap(stats, (0, 0, None))(hidden, targets, 0.8)
        entry = stats(hidden[0, 0], targets[0, 0], 0.8)
        return [stats(hidden, targets, 0.8), mapped, stats(hidden, targets, temperature), entry]

    full, mapped, traced, single = compiled(run, jnp.asarray(0.8))
    for other in (mapped, traced):
        chex.assert_trees_all_close(other, full, rtol=1e-13, atol=1e-14)
    assert single.log_prob.shape == ()
    chex.assert_trees_all_close(single.log_prob, full.log_prob[0, 0], rtol=1e-13)


def test_exponentials_of_all_log_probs_sum_to_one() -> None:
    hidden, head, targets = draw()
    log_prob = program(lambda t: kljax.log_probs_from_hidden(hidden, head, t).log_prob, targets)
    every = [log_prob(jnp.full_like(targets, v)) for v in range(VOCABULARY)]
    chex.assert_trees_all_close(jnp.exp(jnp.stack(every)).sum(0), jnp.ones(targets.shape), rtol=1e-13)


# ---- whole sequences ----


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_statistics_of_sequences_are_aligned_with_tokens(implementation: str) -> None:
    hidden, head, tokens = draw()
    rng = np.random.default_rng(1)
    mask = np.array([[1, 1, 0, 1, 1], [0, 0, 0, 0, 1], [1, 0, 0, 0, 0]], bool)
    temperature = jnp.asarray(rng.uniform(0.7, 1.5, (ROWS, LENGTH)))
    ref_hidden = jnp.asarray(rng.normal(size=hidden.shape))

    def run(hidden: Any, ref_hidden: Any, mask: Any) -> Any:
        def stats(hidden: Any, ref_hidden: Any) -> tuple[jax.Array, Any]:
            full = Head(head, tile=Tile(2, 4), implementation=implementation)
            options = {"temperature": temperature, "entropy": True, "sum_squared_probs": True}
            options |= {"reference": (ref_hidden, None)}
            out = [kljax.token_log_probs(hidden, full, tokens, arguments, **options) for arguments in (mask, None)]
            return sum(x.sum() for x in jax.tree.leaves(out[0])), out  # type: ignore[return-value]

        return jax.grad(stats, (0, 1), has_aux=True)(hidden, ref_hidden)

    gradients, (masked, full) = compiled(run, hidden, ref_hidden, jnp.asarray(mask))
    scored = mask & (np.arange(LENGTH) > 0)
    for row, t in itertools.product(range(ROWS), range(LENGTH)):
        got = {name: x[row, t] for name, x in vars(masked).items() if x is not None}
        if t == 0:
            assert not any(x[row, t] for x in jax.tree.leaves(full))
            assert not any(got.values())
            continue
        p = log_softmax(hidden[row, t - 1], head, temperature[row, t])
        q = log_softmax(ref_hidden[row, t - 1], head, temperature[row, t])
        wanted = {
            "log_prob": p[tokens[row, t]],
            "entropy": -(np.exp(p) * p).sum(),
            "sum_squared_probs": np.exp(2 * p).sum(),
            "kl": (np.exp(p) * (p - q)).sum(),
        }
        for name, value in wanted.items():
            # A KL near 0 is the rest of terms of either sign, each below a nat and rounded twice.
            close = {"rtol": 1e-12, "atol": VOCABULARY * 2.0**-52}
            np.testing.assert_allclose(getattr(full, name)[row, t], value, **close)
            np.testing.assert_allclose(got[name], value if scored[row, t] else 0, **close)
    # A hidden state has a gradient where the next token is scored.
    for gradient in gradients:
        np.testing.assert_array_equal(gradient.any(-1)[:, :-1], scored[:, 1:])
        assert not gradient[:, -1].any()


@pytest.mark.parametrize("length", [0, 1])
def test_sequences_without_a_prediction(length: int) -> None:
    hidden, tokens = jnp.ones((2, length, 3)), jnp.zeros((2, length), int)
    stats = compiled(lambda h, t: kljax.token_log_probs(h, jnp.ones((3, 4)), t), hidden, tokens)
    assert stats.log_prob.shape == (2, length)
    assert not stats.log_prob.any()


def test_optimal_token_baseline_takes_squared_probs() -> None:
    hidden, head, tokens = draw()
    mask, rewards = jnp.ones(tokens.shape, bool), jnp.ones(tokens.shape)
    stats = compiled(lambda h: kljax.token_log_probs(h, head, tokens, mask, sum_squared_probs=True), hidden)
    vocab = np.concatenate([np.zeros((ROWS, 1, VOCABULARY)), log_softmax(hidden, head)[:, :-1]], 1)
    squares = np.exp(2 * vocab).sum(-1)
    np.testing.assert_allclose(stats.sum_squared_probs[:, 1:], squares[:, 1:], rtol=1e-12)
    groups = jnp.zeros(ROWS, int)

    def baseline(squares: Any) -> Any:
        arrays = (rewards, stats.log_prob, squares, mask)
        return kljax.otb_advantages(*(x[:, 1:] for x in arrays), groups, num_groups=1)

    same = program(baseline, stats.sum_squared_probs)
    chex.assert_trees_all_close(same(stats.sum_squared_probs), same(squares), rtol=1e-12, atol=1e-14)


# ---- kept tokens ----


def kept_sets(log_probs: np.ndarray) -> dict[str, np.ndarray]:
    """`[N, V]` tokens that a sampler keeps by each rule, always the most likely one."""
    probs = np.exp(log_probs)
    order = np.argsort(-probs, -1)
    ranks = np.argsort(order, -1)
    before = np.take_along_axis(np.cumsum(np.take_along_axis(probs, order, -1), -1), ranks, -1) - probs
    return {
        "top-k": ranks < 3,
        "top-p": before < 0.7,
        "min-p": probs >= 0.2 * probs.max(-1, keepdims=True),
        "one token": ranks < 1,
        "all": ranks < VOCABULARY,
    }


def ids_of(kept: np.ndarray) -> np.ndarray:
    """The kept ids in the order of the vocabulary, padded with -1."""
    ids = np.where(kept, np.arange(VOCABULARY), VOCABULARY)
    return np.where(np.sort(ids, -1) == VOCABULARY, -1, np.sort(ids, -1))


def test_kept_token_log_probs_match_the_sampling_distribution() -> None:
    # The sampler's set, and the log-probs of the sampler and of a policy that has moved since, for every token.
    hidden, head, _ = draw()
    sampler, policy = hidden.reshape(-1, WIDTH), hidden.reshape(-1, WIDTH) + 0.3
    tokens = len(sampler)
    target = jnp.tile(jnp.arange(VOCABULARY), (tokens, 1)).T

    def run(hidden: Any, kept_ids: Any) -> Any:
        full = Head(head, tile=Tile(4, 4))
        return jax.vmap(lambda t: kljax.renormalized_log_probs(hidden, full, t, kept_ids, temperature=0.8))(target)

    sets = kept_sets(log_softmax(sampler, head, 0.8))
    everything = program(run, sampler, jnp.zeros((tokens, VOCABULARY), int))
    for (rule, selected), states in itertools.product(sets.items(), (sampler, policy)):
        log_probs = log_softmax(states, head, 0.8)
        stats = everything(states, jnp.asarray(ids_of(selected)))
        mass = np.where(selected, np.exp(log_probs), 0).sum(-1, keepdims=True)
        listed = np.asarray(stats.log_prob).T[selected]
        np.testing.assert_allclose(listed, (log_probs - np.log(mass))[selected], rtol=1e-11, atol=1e-13, err_msg=rule)
        np.testing.assert_allclose(
            np.asarray(stats.log_kept_mass).T[selected], np.log(mass + 0 * log_probs)[selected], atol=1e-13
        )
        # The probabilities of the set add up to 1, and a target that is not listed belongs to it.
        sums = np.where(selected, np.exp(np.asarray(stats.log_prob).T), 0).sum(-1)
        np.testing.assert_allclose(sums, 1, rtol=1e-12, err_msg=rule)
        joined = np.log(mass + np.exp(log_probs))
        outside = (log_probs - joined)[~selected]
        np.testing.assert_allclose(
            np.asarray(stats.log_prob).T[~selected], outside, rtol=1e-11, atol=1e-13, err_msg=rule
        )


def test_single_kept_token_is_certain_without_gradient() -> None:
    hidden, head, targets = draw()

    def run(hidden: Any) -> Any:
        stats = lambda h: kljax.renormalized_log_probs(h, head, targets, targets[..., None]).log_prob  # noqa: E731
        return stats(hidden), jax.grad(lambda h: stats(h).sum())(hidden)

    value, gradient = compiled(run, hidden)
    np.testing.assert_array_equal(value, 0)
    np.testing.assert_allclose(gradient, 0, atol=1e-15)
