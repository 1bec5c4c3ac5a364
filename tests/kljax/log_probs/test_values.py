"""Log-probs from hidden states against NumPy in float64: values, entropy, temperature, cap, targets, dtypes, errors."""

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import kljax

# Sizes that divide nothing.
ROWS, LENGTH, WIDTH, VOCABULARY = 3, 5, 7, 11


def draw(dtype: jnp.dtype = jnp.float64) -> tuple[jax.Array, jax.Array, jax.Array]:
    rng = np.random.default_rng(0)
    hidden = jnp.asarray(rng.normal(size=(ROWS, LENGTH, WIDTH)), dtype)
    head = jnp.asarray(rng.normal(size=(WIDTH, VOCABULARY)), dtype)
    return hidden, head, jnp.asarray(rng.integers(0, VOCABULARY, (ROWS, LENGTH)))


def oracle(
    hidden: jax.Array, head: jax.Array, targets: jax.Array, temperature: float = 1.0, softcap: float | None = None
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Log-prob, logsumexp and entropy, position by position in float64."""
    h, w = np.asarray(hidden, np.float64), np.asarray(head, np.float64)
    log_prob, logsumexp, entropy = (np.zeros(targets.shape) for _ in range(3))
    for at in np.ndindex(*targets.shape):
        z = h[at] @ w
        z = (softcap * np.tanh(z / softcap) if softcap else z) / temperature
        total = np.exp(z - z.max()).sum()
        logsumexp[at] = z.max() + np.log(total)
        p = np.exp(z - logsumexp[at])
        log_prob[at] = z[targets[at]] - logsumexp[at]
        entropy[at] = -(p * np.log(p)).sum()
    return log_prob, logsumexp, entropy


@pytest.mark.parametrize("implementation", [None, "reference"])
@pytest.mark.parametrize("softcap", [None, 1.5])
@pytest.mark.parametrize("temperature", [1.0, 0.6])
def test_values(temperature: float, softcap: float | None, implementation: str | None) -> None:
    hidden, head, targets = draw()
    kwargs = {"temperature": temperature, "softcap": softcap}
    stats = kljax.log_probs_from_hidden(hidden, head, targets, entropy=True, implementation=implementation, **kwargs)
    expected = oracle(hidden, head, targets, **kwargs)
    chex.assert_trees_all_close((stats.log_prob, stats.logsumexp, stats.entropy), expected, rtol=1e-12, atol=1e-14)
    assert stats.kl is None
    without = kljax.log_probs_from_hidden(hidden, head, targets, implementation=implementation, **kwargs)
    assert without.entropy is None
    chex.assert_trees_all_equal(without.log_prob, stats.log_prob)


def test_gradients_by_central_differences() -> None:
    hidden, head, targets = draw()

    def total(hidden: jax.Array, head: jax.Array) -> jax.Array:
        stats = kljax.log_probs_from_hidden(hidden, head, targets, temperature=0.7, softcap=2.0, entropy=True)
        return (stats.log_prob + 0.3 * stats.entropy + 0.1 * stats.logsumexp).sum()

    grads = jax.grad(total, (0, 1))(hidden, head)
    for index, (array, at) in enumerate([(hidden, (1, 2, 3)), (head, (4, 5))]):
        step = jnp.zeros_like(array).at[at].set(1e-6)
        moved = [[hidden, head], [hidden, head]]
        moved[0][index], moved[1][index] = array + step, array - step
        slope = (total(*moved[0]) - total(*moved[1])) / 2e-6
        chex.assert_trees_all_close(grads[index][at], slope, rtol=1e-7, atol=1e-8)


def test_gradient_of_the_log_prob_is_one_hot_minus_softmax() -> None:
    logits = jnp.asarray([[0.3, -1.0, 2.0]])
    grad = jax.grad(lambda h: kljax.log_probs_from_hidden(h, jnp.eye(3), jnp.array([2])).log_prob.sum())(logits)
    chex.assert_trees_all_close(grad, jnp.array([[0.0, 0.0, 1.0]]) - jax.nn.softmax(logits), rtol=1e-12)


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16, jnp.float32])
def test_narrow_inputs_are_computed_in_float32(dtype: jnp.dtype) -> None:
    hidden, head, targets = draw(dtype)
    stats = kljax.log_probs_from_hidden(hidden, head, targets, entropy=True)
    assert {field.dtype for field in (stats.log_prob, stats.logsumexp, stats.entropy)} == {jnp.dtype(jnp.float32)}
    expected = oracle(hidden, head, targets)
    actual = [np.asarray(field, np.float64) for field in (stats.log_prob, stats.logsumexp, stats.entropy)]
    chex.assert_trees_all_close(actual, list(expected), rtol=2e-6, atol=2e-6)


def test_mixed_inputs_take_the_wide_type() -> None:
    hidden, head, targets = draw()
    assert kljax.log_probs_from_hidden(hidden.astype(jnp.bfloat16), head, targets).log_prob.dtype == jnp.float64


def test_an_impossible_token_adds_nothing_to_the_entropy() -> None:
    # A head that gives one token a logit of -infinity: probability 0, and 0 * -inf is not NaN.
    hidden, head = jnp.ones((1, 1)), jnp.asarray([[0.0, 0.0, -jnp.inf]])
    stats = kljax.log_probs_from_hidden(hidden, head, jnp.array([0]), entropy=True)
    chex.assert_trees_all_close((stats.log_prob, stats.entropy), (-jnp.log(2.0)[None], jnp.log(2.0)[None]))
    impossible = kljax.log_probs_from_hidden(hidden, head, jnp.array([2]))
    chex.assert_trees_all_equal(impossible.log_prob, jnp.array([-jnp.inf]))
    grad = jax.grad(lambda z: kljax.log_probs_from_hidden(hidden, z, jnp.array([0]), entropy=True).entropy.sum())(
        jnp.asarray([[0.0, 1.0, -jnp.inf]])
    )
    chex.assert_tree_all_finite(grad)


def test_large_logits_do_not_overflow() -> None:
    stats = kljax.log_probs_from_hidden(
        jnp.asarray([[1.0]], jnp.float32), jnp.asarray([[1e4, 0.0]], jnp.float32), jnp.array([0]), entropy=True
    )
    chex.assert_trees_all_equal((stats.log_prob, stats.entropy), (jnp.float32([0.0]), jnp.float32([0.0])))


@pytest.mark.parametrize("target", [-1, -100, VOCABULARY, 10**6])
def test_targets_outside_are_clamped_and_stay_finite(target: int) -> None:
    hidden, head, targets = draw()
    inside = jnp.clip(jnp.full_like(targets, target), 0, VOCABULARY - 1)
    outside = kljax.log_probs_from_hidden(hidden, head, jnp.full_like(targets, target))
    chex.assert_trees_all_equal(outside.log_prob, kljax.log_probs_from_hidden(hidden, head, inside).log_prob)


def test_leading_axes_jit_vmap_and_traced_temperature() -> None:
    hidden, head, targets = draw()
    whole = kljax.log_probs_from_hidden(hidden, head, targets, temperature=0.8, entropy=True)
    mapped = jax.vmap(lambda h, t: kljax.log_probs_from_hidden(h, head, t, temperature=0.8, entropy=True))(
        hidden, targets
    )
    jitted = jax.jit(lambda t: kljax.log_probs_from_hidden(hidden, head, targets, temperature=t, entropy=True))(0.8)
    for other in (mapped, jitted):
        chex.assert_trees_all_close(other, whole, rtol=1e-13, atol=1e-14)
    one = kljax.log_probs_from_hidden(hidden[0, 0], head, targets[0, 0], temperature=0.8)
    assert one.log_prob.shape == ()
    chex.assert_trees_all_close(one.log_prob, whole.log_prob[0, 0], rtol=1e-13)


def test_exponentials_of_all_log_probs_sum_to_one() -> None:
    hidden, head, targets = draw()
    every = [kljax.log_probs_from_hidden(hidden, head, jnp.full_like(targets, v)).log_prob for v in range(VOCABULARY)]
    chex.assert_trees_all_close(jnp.exp(jnp.stack(every)).sum(0), jnp.ones(targets.shape), rtol=1e-13)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"head": jnp.zeros((3, 4))}, r"head: got shape \[3, 4\], expected \[D, V\] with hidden \[3, 5, 7\]"),
        ({"head": jnp.zeros(7)}, r"head: got shape \[7\], expected \[D, V\]"),
        ({"targets": jnp.zeros((3, 4), int)}, r"targets: got shape \[3, 4\], expected \[3, 5\]"),
        ({"temperature": 0.0}, r"temperature: got 0\.0, expected a number > 0"),
        ({"softcap": -1.0}, r"softcap: got -1\.0, expected a number > 0"),
        (
            {"implementation": "refrence"},
            r"implementation: got 'refrence', expected one of tile, reference; did you mean 'reference'",
        ),
    ],
)
def test_errors(change: dict[str, object], message: str) -> None:
    hidden, head, targets = draw()
    arguments = {"hidden": hidden, "head": head, "targets": targets, **change}
    arrays = [arguments.pop(name) for name in ("hidden", "head", "targets")]
    with pytest.raises(ValueError, match=message):
        kljax.log_probs_from_hidden(*arrays, **arguments)
