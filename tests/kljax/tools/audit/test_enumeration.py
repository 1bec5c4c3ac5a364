"""The audit's exact numbers against the enumeration of every sequence, on-policy and off-policy."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import kljax
from kljax.tools.audit import Audit
from tests import other_seeds
from tests.kljax.calls import QUICK
from tests.kljax.tools.audit.enumeration import FORMULAS, Row

# Four tokens, as in the other tests of the audit, which so share its programs.
ROWS, LENGTH, VOCABULARY = 2, 3, 4
CLOSE = {"rtol": 1e-9, "atol": 1e-12}
CAP = 1.2
CAPS = {"none": None, "ratio": np.inf, "capped": CAP}
PLACES = ("loss", "straight_through", "reward", "reward_baseline", "advantage")


@pytest.fixture(scope="module")
def logits() -> list[np.ndarray]:
    """Policy, reference and behaviour policy, `[3, N, T, V]`: an example, as a bias can be shown on one alone."""
    return list(other_seeds.example(0).normal(size=(3, ROWS, LENGTH, VOCABULARY)))


@pytest.fixture(scope="module")
def off_policy(logits: list[np.ndarray]) -> Audit:
    return kljax.audit.audit_logits(*logits, max_ratio=CAP, bootstrap=0)


@pytest.fixture(scope="module")
def on_policy(logits: list[np.ndarray]) -> Audit:
    return kljax.audit.audit_logits(*logits[:2], bootstrap=0)


def rows_of(logits: list[np.ndarray], *, stale: bool) -> list[Row]:
    policy, ref, behaviour = logits
    return [Row(policy[n], ref[n], behaviour[n] if stale else policy[n]) for n in range(ROWS)]


def token_rows(logits: list[np.ndarray], *, stale: bool) -> list[Row]:
    """Every position as a sequence of its own."""
    apart = [array.reshape(ROWS * LENGTH, 1, VOCABULARY) for array in logits]
    policy, ref, behaviour = apart
    return [Row(policy[n], ref[n], behaviour[n] if stale else policy[n]) for n in range(ROWS * LENGTH)]


def cases(on: Audit, off: Audit, logits: list[np.ndarray]) -> list[tuple[str, str, Audit, list[Row]]]:
    """Level, correction, audit and the rows to enumerate."""
    collected = []
    for level, rows in (("token", token_rows), ("sequence", rows_of)):
        collected.append((level, "none", on, rows(logits, stale=False)))
        collected += [(level, correction, off, rows(logits, stale=True)) for correction in CAPS]
    return collected


def number(audit: Audit, metric: str, **labels: str) -> float:
    return audit.find(how="exact", **labels).metrics[metric].value


def test_kl_and_gradient_match_the_enumerated_sequences(logits: list[np.ndarray]) -> None:
    sequences = jnp.array(list(itertools.product(range(VOCABULARY), repeat=LENGTH)))
    steps = jnp.arange(LENGTH)

    def sequence_kl(policy: jax.Array, ref: jax.Array) -> jax.Array:
        def log_prob(z: jax.Array) -> jax.Array:
            return jax.vmap(lambda tokens: jax.nn.log_softmax(z)[steps, tokens].sum())(sequences)

        return (jnp.exp(log_prob(policy)) * (log_prob(policy) - log_prob(ref))).sum()

    value_and_grad = jax.jit(jax.value_and_grad(sequence_kl), compiler_options=QUICK)
    for row, policy, ref in zip(rows_of(logits, stale=False), *logits[:2], strict=True):
        value, gradient = value_and_grad(jnp.asarray(policy), jnp.asarray(ref))
        np.testing.assert_allclose(row.kl, value, **CLOSE)
        np.testing.assert_allclose(row.gradient, gradient, **CLOSE)


def test_kl(on_policy: Audit, off_policy: Audit, logits: list[np.ndarray]) -> None:
    for level, _, audit, rows in cases(on_policy, off_policy, logits):
        np.testing.assert_allclose(audit.kl[level].value, np.mean([row.kl for row in rows]), **CLOSE)


@pytest.mark.parametrize("estimator", FORMULAS)
def test_values(estimator: str, on_policy: Audit, off_policy: Audit, logits: list[np.ndarray]) -> None:
    for level, correction, audit, rows in cases(on_policy, off_policy, logits):
        means, variances = np.array([row.value(estimator, CAPS[correction]) for row in rows]).T
        kls = np.array([row.kl for row in rows])
        expected = {
            "mean": means.mean(),
            "bias": means.mean() - kls.mean(),
            "relative_bias": means.mean() / kls.mean() - 1,
            "variance": variances.mean(),
            "snr": np.abs(means.mean()) / np.sqrt(variances.mean()),
            "rmse": np.sqrt(((means - kls) ** 2 + variances).mean()),
        }
        audited = audit.find(kind="value", level=level, correction=correction, estimator=estimator).metrics
        np.testing.assert_allclose([audited[name].value for name in expected], list(expected.values()), **CLOSE)


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("estimator", FORMULAS)
def test_gradients(place: str, estimator: str, on_policy: Audit, off_policy: Audit, logits: list[np.ndarray]) -> None:
    for level, correction, audit, rows in cases(on_policy, off_policy, logits):
        cap = CAPS[correction]
        mean = np.mean([row.value(estimator, cap)[0] for row in rows]) / len(rows[0].policy)
        pairs = [row.gradients(place, estimator, cap, mean) for row in rows]
        expected, exact = np.array([pair[0] for pair in pairs]), np.array([row.gradient for row in rows])
        variance = np.mean([pair[1] for pair in pairs])
        size = np.linalg.norm(expected)
        wanted = {
            "bias_norm": np.linalg.norm(expected - exact) / np.sqrt(len(rows)),
            "relative_bias": np.linalg.norm(expected - exact) / np.linalg.norm(exact),
            "cosine": (expected * exact).sum() / (size * np.linalg.norm(exact)) if size > 1e-12 else 0,
            "gain": (expected * exact).sum() / (exact**2).sum(),
            "variance": variance,
            "snr": size / np.sqrt(len(rows) * variance),
        }
        name = "any" if place == "straight_through" else estimator
        audited = audit.find(kind="gradient", level=level, correction=correction, place=place, estimator=name).metrics
        np.testing.assert_allclose([audited[key].value for key in wanted], list(wanted.values()), rtol=1e-8, atol=1e-8)


@pytest.mark.parametrize("level", ["token", "sequence"])
def test_bias_of_estimators_on_policy(level: str, on_policy: Audit) -> None:
    def bias(kind: str, estimator: str, place: str = "") -> float:
        return abs(number(on_policy, "relative_bias", kind=kind, level=level, estimator=estimator, place=place))

    for estimator in ("k1", "k3"):
        assert bias("value", estimator) < 1e-12
    for estimator in ("abs", "k2"):
        assert bias("value", estimator) > 0.05
    paid = [("k1", placement) for placement in ("reward", "reward_baseline", "advantage")]
    for estimator, placement in (("k2", "loss"), ("any", "straight_through"), *paid):
        assert bias("gradient", estimator, placement) < 1e-12
    for estimator, placement in (
        ("k1", "loss"),
        ("k3", "loss"),
        ("k3", "reward"),
        ("k2", "reward"),
        ("k3", "advantage"),
    ):
        assert bias("gradient", estimator, placement) > 0.1
    k1 = on_policy.find(kind="gradient", level=level, estimator="k1", place="loss").metrics
    assert (k1["cosine"].value, k1["snr"].value) == (0, 0), "k1 as a loss term is noise and nothing else"


@pytest.mark.parametrize("level", ["token", "sequence"])
def test_bias_of_estimators_off_policy(level: str, off_policy: Audit) -> None:
    def bias(kind: str, estimator: str, correction: str, place: str = "") -> float:
        labels = {"kind": kind, "level": level, "estimator": estimator, "correction": correction, "place": place}
        return abs(number(off_policy, "relative_bias", **labels))

    for estimator in ("k1", "k2", "k3"):
        assert bias("value", estimator, "none") > 0.1
        assert bias("gradient", estimator, "none", "loss") > 0.1
    for estimator in ("k1", "k3"):
        assert bias("value", estimator, "ratio") < 1e-12
        assert bias("gradient", estimator, "ratio", "loss") < 1e-12
        assert bias("value", estimator, "capped") > 0.01
    for estimator, placement in (("any", "straight_through"), ("k1", "reward"), ("k1", "advantage")):
        assert bias("gradient", estimator, "ratio", placement) < 1e-12
        assert bias("gradient", estimator, "none", placement) > 0.1
    # Differentiating the ratio adds the gradient of the sampling itself, which k2 does not have room for.
    assert bias("gradient", "k2", "ratio", "loss") > 0.1


def test_low_var_kl_is_k3_within_its_clips(logits: list[np.ndarray]) -> None:
    far = logits[0] + np.array([6.0, 0, -6.0, 0])
    near, clipped = (kljax.audit.audit_logits(policy, logits[1], bootstrap=0) for policy in (logits[0], far))
    for audit, same in ((near, True), (clipped, False)):
        values = audit.select(kind="value", level="token")
        biases = {actual.estimator: abs(actual.metrics["relative_bias"].value) for actual in values}
        assert biases["k3"] < 1e-12
        assert (biases["low_var_kl"] < 1e-12) == same


def test_answers_are_the_unbiased_estimator_of_least_variance(on_policy: Audit, off_policy: Audit) -> None:
    chosen = {a.place: (a.estimator, a.right) for a in on_policy.answers()}
    assert chosen == {
        "value": ("k3", True),
        "loss": ("k2", True),
        "straight_through": ("any", True),
        "reward": ("k1", True),
        "reward_baseline": ("k1", True),
        "advantage": ("k1", True),
    }
    stale = {(a.place, a.correction): (a.estimator, a.right) for a in off_policy.answers()}
    assert stale["value", "ratio"] == ("k3", True)
    assert stale["loss", "ratio"] == ("k3", True)
    assert stale["reward", "ratio"] == ("k1", True)
    assert not any(right for (_, correction), (_, right) in stale.items() if correction == "none")
