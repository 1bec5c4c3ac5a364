"""Exact divergences of tokens: aligned with the log-probs of the tokens, and masks of tokens go nowhere else."""

import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import kljax
from tests.kljax.calls import compiled

ROWS, LENGTH, WIDTH, VOCABULARY = 3, 6, 4, 9
RNG = np.random.default_rng(0)
HIDDEN, REF_HIDDEN = jnp.asarray(RNG.normal(size=(2, ROWS, LENGTH, WIDTH)))
WEIGHTS, REF_WEIGHTS = jnp.asarray(RNG.normal(size=(2, WIDTH, VOCABULARY)))
TOKENS = jnp.asarray(RNG.integers(0, VOCABULARY, (ROWS, LENGTH)))
# A prompt of two, a completion from the first token on, a row without a token; the last one of a row counts.
MASK = jnp.asarray(np.array([[0, 0, 1, 1, 1, 1], [1, 1, 0, 1, 0, 0], [0, 0, 0, 0, 0, 0]], bool))
WEIGHT_OF_TOKEN = jnp.asarray(RNG.normal(size=(ROWS, LENGTH)), jnp.float32)
TEMPERATURE = jnp.asarray(RNG.uniform(0.5, 1.5, (ROWS, LENGTH)))


def kl_by_definition(temperature: Any = 1.0) -> np.ndarray:
    """KL(policy || reference) at each token: of the logits after the token before it."""
    kl = np.zeros((ROWS, LENGTH))
    temperature = np.broadcast_to(temperature, (ROWS, LENGTH))
    for row in range(ROWS):
        for t in range(1, LENGTH):
            pairs = ((HIDDEN, WEIGHTS), (REF_HIDDEN, REF_WEIGHTS))
            p, q = (np.asarray(h[row, t - 1] @ w) / temperature[row, t] for h, w in pairs)
            p, q = (x - np.log(np.exp(x).sum()) for x in (p, q))
            kl[row, t] = (np.exp(p) * (p - q)).sum()
    return kl


@pytest.mark.parametrize("temperature", [0.7, TEMPERATURE], ids=["scalar", "per token"])
@pytest.mark.parametrize("mask", [MASK, None], ids=["mask", "no mask"])
def test_token_kl_matches_its_definition(mask: Any, temperature: Any) -> None:
    kl = kljax.token_kl(HIDDEN, WEIGHTS, REF_HIDDEN, REF_WEIGHTS, mask, temperature=temperature)
    expected = kl_by_definition(temperature) * (1 if mask is None else np.asarray(mask))
    np.testing.assert_allclose(kl, expected, rtol=1e-5, atol=1e-7)
    np.testing.assert_array_equal(kl[:, 0], 0)


@pytest.mark.parametrize("direction", ["reverse", "forward"])
def test_token_kl_and_gradient_match_token_log_probs(direction: Any) -> None:
    def direct(hidden: Any, weights: Any) -> Any:
        kl = kljax.token_kl(hidden, weights, REF_HIDDEN, REF_WEIGHTS, MASK, direction=direction, temperature=0.7)
        return (kl * WEIGHT_OF_TOKEN).sum(), kl

    def beside_log_probs(hidden: Any, weights: Any) -> Any:
        reference = kljax.ReferenceStates(REF_HIDDEN, REF_WEIGHTS, direction)
        kl = kljax.token_log_probs(hidden, weights, TOKENS, MASK, temperature=0.7, reference=reference).kl
        return (kl * WEIGHT_OF_TOKEN).sum(), kl

    def both(hidden: Any, weights: Any) -> Any:
        return [jax.value_and_grad(f, (0, 1), has_aux=True)(hidden, weights) for f in (direct, beside_log_probs)]

    first, second = compiled(both, HIDDEN, WEIGHTS)
    assert np.count_nonzero(first[0][1]) == np.asarray(MASK)[:, 1:].sum()
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-7), first, second)


def test_token_divergences_are_shifted_by_one_position() -> None:
    before, hidden_mask = (HIDDEN[:, :-1], WEIGHTS, REF_HIDDEN[:, :-1], REF_WEIGHTS), MASK[:, 1:]
    kl = kljax.kl_from_hidden(*before, hidden_mask=hidden_mask)
    jsd = kljax.jsd_from_hidden(*before, hidden_mask=hidden_mask, beta=0.3)
    sequences = HIDDEN, WEIGHTS, REF_HIDDEN, REF_WEIGHTS, MASK
    np.testing.assert_allclose(kljax.token_kl(*sequences)[:, 1:], kl, rtol=1e-6)
    np.testing.assert_allclose(kljax.token_jsd(*sequences, beta=0.3)[:, 1:], jsd, rtol=1e-6)
    assert float(jsd.max()) > 0.01


@pytest.mark.parametrize(
    ("function", "named"), [(kljax.kl_from_hidden, "kljax.token_kl"), (kljax.jsd_from_hidden, "kljax.token_jsd")]
)
def test_token_mask_is_refused_beside_hidden_states(function: Any, named: str) -> None:
    with pytest.raises(TypeError, match=rf"^mask: .* one position off; call {named} .* or pass `hidden_mask`"):
        function(HIDDEN, WEIGHTS, REF_HIDDEN, mask=MASK)
    with pytest.raises(ValueError, match=r"^hidden_mask: got shape \[3, 5\], expected \[3, 6\] as hidden has"):
        function(HIDDEN, WEIGHTS, REF_HIDDEN, hidden_mask=MASK[:, 1:])


@pytest.mark.parametrize("function", [kljax.token_kl, kljax.token_jsd])
def test_tokens_need_an_axis_of_positions(function: Any) -> None:
    with pytest.raises(ValueError, match=r"^hidden: got shape \[4\], expected \[\.\.\., T, D\]"):
        function(HIDDEN[0, 0], WEIGHTS, REF_HIDDEN[0, 0])
    with pytest.raises(ValueError, match=r"^mask: got shape \[3, 5\], expected \[3, 6\] as hidden has"):
        function(HIDDEN, WEIGHTS, REF_HIDDEN, None, MASK[:, 1:])


FUNCTIONS = (kljax.token_kl, kljax.kl_from_hidden, kljax.token_jsd, kljax.jsd_from_hidden)


@pytest.mark.parametrize("function", FUNCTIONS, ids=lambda function: function.__name__)
def test_pair_in_place_of_hidden_states_is_named(function: Any) -> None:
    message = "ref_hidden: got a pair, expected hidden states [..., D]; pass the head as ref_head"
    with pytest.raises(TypeError, match=re.escape(message)):
        function(HIDDEN, WEIGHTS, (REF_HIDDEN, REF_WEIGHTS))
    with pytest.raises(TypeError, match=r"ref_hidden: got a ReferenceStates, expected hidden states"):
        function(HIDDEN, WEIGHTS, kljax.ReferenceStates(REF_HIDDEN))


@pytest.mark.parametrize("reference", [REF_HIDDEN, (REF_HIDDEN,), (REF_HIDDEN, WEIGHTS, "forward", 1)])
def test_reference_without_head_error_names_the_pair(reference: Any) -> None:
    message = r"^reference: got .*, expected \(ref_hidden, ref_head\), or .*; for the policy's own head pass \(ref_h"
    with pytest.raises(TypeError, match=message):
        kljax.token_log_probs(HIDDEN, WEIGHTS, TOKENS, MASK, reference=reference)


def test_exact_kl_hints_name_the_functions() -> None:
    with pytest.raises(AttributeError, match=r"did you mean kljax\.token_kl\? the exact KL .* kljax\.kl_from_hidden"):
        _ = kljax.exact_kl  # type: ignore[attr-defined]
    with pytest.raises(ValueError, match=r"estimator: got 'exact', .* kljax\.token_kl, kljax\.kl_from_hidden"):
        kljax.estimate_kl(jnp.zeros(3), jnp.zeros(3), estimator="exact")  # type: ignore[arg-type]
