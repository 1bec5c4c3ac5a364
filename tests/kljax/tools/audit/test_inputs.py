"""Masks, forbidden tokens, precision, bootstrap units, and inputs that an audit refuses."""

import json
import pathlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import kljax
from kljax.tools.audit import Audit
from kljax.tools.audit._metrics import bootstrap, value_metrics


@pytest.fixture(scope="module")
def pair() -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(0)
    policy = rng.normal(size=(3, 3, 4))
    return policy, policy + 0.5 * rng.normal(size=policy.shape)


def same(a: Audit, b: Audit, **tolerance: float) -> None:
    for left, right in zip(a.results, b.results, strict=True):
        for name, metric in left.metrics.items():
            np.testing.assert_allclose(metric.value, right.metrics[name].value, **tolerance)


def test_masked_positions_reach_nothing(pair: tuple[np.ndarray, np.ndarray]) -> None:
    policy, ref = pair
    mask = np.array([[1, 0, 1], [0, 0, 0], [1, 1, 1]], bool)
    spoiled = np.where(mask[..., None], policy, np.nan)
    audit = kljax.audit.audit_logits(spoiled, np.where(mask[..., None], ref, np.inf), None, mask, bootstrap=0)
    # Without a place for the row: the tokens as rows of their own, and per sequence the rows that have any.
    tokens = kljax.audit.audit_logits(policy[mask][:, None], ref[mask][:, None], bootstrap=0)
    for kind in ("value", "gradient"):
        for a, b in zip(*(x.select(kind=kind, level="token") for x in (audit, tokens)), strict=True):
            for name, metric in a.metrics.items():
                np.testing.assert_allclose(metric.value, b.metrics[name].value, rtol=1e-10, atol=1e-12)
    assert audit.settings["rows"] == 2
    assert audit.settings["positions"] == 5
    np.testing.assert_allclose(audit.kl["sequence"].value, tokens.kl["token"].value * 5 / 2, rtol=1e-12)


def test_token_forbidden_by_all_changes_nothing(pair: tuple[np.ndarray, np.ndarray]) -> None:
    forbidden = [np.concatenate([array, np.full((*array.shape[:2], 1), -np.inf)], axis=-1) for array in pair]
    same(
        kljax.audit.audit_logits(*forbidden, bootstrap=0),
        kljax.audit.audit_logits(*pair, bootstrap=0),
        rtol=1e-10,
        atol=1e-12,
    )


def test_token_never_sampled_counts_in_the_exact_kl(
    pair: tuple[np.ndarray, np.ndarray],
) -> None:
    # KL(pi || ref) does not care what the reference does with tokens outside pi, beyond the mass they take.
    policy, ref = (array.copy() for array in pair)
    policy[..., 0] = -np.inf
    log_p, log_q = (np.asarray(jax.nn.log_softmax(z)) for z in (policy, ref))
    kl = (np.exp(log_p[..., 1:]) * (log_p - log_q)[..., 1:]).sum(-1).mean()
    audit = kljax.audit.audit_logits(policy, ref, bootstrap=0)
    np.testing.assert_allclose(audit.kl["token"].value, kl, rtol=1e-12)
    # k3 counts on the reference's probabilities over the drawn tokens adding up to one; k1 does not.
    biases = {r.estimator: r.metrics["bias"].value for r in audit.select(kind="value", level="token")}
    assert abs(biases["k1"]) < 1e-12
    np.testing.assert_allclose(biases["k3"], -np.exp(log_q[..., 0]).mean(), rtol=1e-12)


def test_equal_policies_have_no_relative_bias(pair: tuple[np.ndarray, np.ndarray]) -> None:
    audit = kljax.audit.audit_logits(pair[0], pair[0], bootstrap=10)
    assert audit.kl["token"] == (0, 0, 0)
    assert np.isnan(audit.find(kind="value", level="token", estimator="k1").metrics["relative_bias"].value)
    assert audit.answers() == []
    assert audit.to_dict()["results"][0]["metrics"]["relative_bias"]["value"] is None


def test_a_small_kl_is_accurate_in_float32(pair: tuple[np.ndarray, np.ndarray]) -> None:
    near = pair[0] + 1e-3 * (pair[1] - pair[0])
    exact = kljax.audit.audit_logits(pair[0], near, bootstrap=0).kl["token"].value
    with jax.enable_x64(False):
        single = kljax.audit.audit_logits(pair[0], near, bootstrap=0)
    assert single.settings["precision"] == "float32"
    np.testing.assert_allclose(single.kl["token"].value, exact, rtol=2e-3)
    k1 = single.find(kind="gradient", level="token", estimator="k1", place="loss").metrics
    assert k1["cosine"].value == 0, "what rounding leaves of a zero gradient has no direction"


def test_arrays_may_lie_on_disk(pair: tuple[np.ndarray, np.ndarray], tmp_path: pathlib.Path) -> None:
    for name, array in zip(("policy", "ref"), pair, strict=True):
        np.save(tmp_path / f"{name}.npy", array)
    mapped = [np.load(tmp_path / f"{name}.npy", mmap_mode="r") for name in ("policy", "ref")]
    same(kljax.audit.audit_logits(*mapped, bootstrap=0), kljax.audit.audit_logits(*pair, bootstrap=0), rtol=1e-12)


def test_bootstrap_has_the_spread_of_the_mean() -> None:
    values = np.random.default_rng(0).normal(size=(400, 1))
    sums = dict.fromkeys(("exact", "mean", "squared_bias", "variance"), values) | {"count": np.ones((400, 1))}
    low, high = bootstrap(jax.random.key(0), sums, value_metrics, replicates=2000, confidence=0.95)["mean"][:, 0]
    error = values.std() / 20
    np.testing.assert_allclose([low, high], values.mean() + np.array([-1.96, 1.96]) * error, atol=0.12 * error)


def test_rows_or_positions_are_resampled(pair: tuple[np.ndarray, np.ndarray]) -> None:
    # Positions of a row are copies of one another: resampling them alone pretends to know more than there is.
    copies = [np.repeat(array[:, :1], 16, axis=1) for array in pair]
    rows, positions = (
        kljax.audit.audit_logits(*copies, bootstrap=200, resample=unit).kl["token"] for unit in ("rows", "positions")
    )
    assert rows.value == pytest.approx(positions.value, rel=1e-12)
    assert rows.high - rows.low > 2 * (positions.high - positions.low)
    assert kljax.audit.audit_logits(*copies, bootstrap=0).settings["resampled"] == "positions"


def test_key_determines_the_sample(pair: tuple[np.ndarray, np.ndarray]) -> None:
    first, again, other = (
        kljax.audit.audit_logits(*pair, draws=3, bootstrap=20, key=jax.random.key(seed)) for seed in (1, 1, 2)
    )
    assert first.to_dict() == again.to_dict()
    assert first.to_dict() != other.to_dict()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"ref_logits": np.zeros((3, 3, 5))}, "shapes differ"),
        ({"logits": np.zeros((3, 4)), "ref_logits": np.zeros((3, 4))}, r"expected \[N, T, V\]"),
        ({"mask": np.ones((3, 2), bool)}, "mask: got shape"),
        ({"mask": np.zeros((3, 3), bool)}, "no position is unmasked"),
        ({"logits": np.full((3, 3, 4), np.nan)}, "NaN"),
        ({"ref_logits": np.where(np.arange(4) == 0, -np.inf, np.zeros((3, 3, 4)))}, "infinite at 9 of 9"),
        ({"sampling_logits": np.full((3, 3, 4), np.nan)}, "sampling_logits: NaN"),
        ({"draws": 1}, "at least 2"),
        ({"draws": -1}, "draws"),
        ({"bootstrap": -1}, "bootstrap"),
        ({"confidence": 1.0}, "confidence"),
        ({"max_ratio": 0.0}, "max_ratio"),
        ({"max_ratio": np.inf}, "max_ratio: got inf, expected a finite number > 0; the ratio without a cap"),
        ({"max_ratio": np.nan}, "max_ratio"),
        ({"resample": "tokens"}, "resample"),
        ({"chunk_size": 0}, "chunk_size"),
    ],
)
def test_nonsense_arguments_are_refused(
    change: dict[str, object], message: str, pair: tuple[np.ndarray, np.ndarray]
) -> None:
    arguments = {"logits": pair[0], "ref_logits": pair[1], "bootstrap": 0} | change
    with pytest.raises(ValueError, match=message):
        kljax.audit.audit_logits(**arguments)


def test_a_mask_of_weights_is_refused(pair: tuple[np.ndarray, np.ndarray]) -> None:
    with pytest.raises(TypeError, match="mask"):
        kljax.audit.audit_logits(*pair, None, np.ones((3, 3)))


def test_options_may_be_numbers_of_numpy(pair: tuple[np.ndarray, np.ndarray]) -> None:
    audit = kljax.audit.audit_logits(*pair, pair[1], bootstrap=np.int64(0), max_ratio=np.float32(1.5))
    settings = json.loads(json.dumps(audit.to_dict()["settings"]))
    assert settings["max_ratio"] == 1.5
    assert settings["bootstrap"] == 0


@pytest.mark.parametrize("kl", [0.01, 1.0])
def test_example_has_the_requested_kl(kl: float) -> None:
    policy, ref, behaviour = kljax.audit.example_logits(rows=4, length=4, vocabulary=40, kl=kl, staleness=0.05)
    log_p, log_q, log_b = (jax.nn.log_softmax(jnp.asarray(z, jnp.float64)) for z in (policy, ref, behaviour))
    np.testing.assert_allclose((jnp.exp(log_p) * (log_p - log_q)).sum(-1).mean(), kl, rtol=1e-3)
    np.testing.assert_allclose((jnp.exp(log_p) * (log_p - log_b)).sum(-1).mean(), 0.05, rtol=1e-3)
    # The behaviour policy lies on the way: nearer to the reference than the policy is, as an earlier state would.
    assert (jnp.exp(log_b) * (log_b - log_q)).sum(-1).mean() < kl + 0.05
    for arguments in ({"rows": 0}, {"vocabulary": 1}, {"kl": -1.0}, {"staleness": -0.1}):
        with pytest.raises(ValueError, match=next(iter(arguments))):
            kljax.audit.example_logits(**arguments)
