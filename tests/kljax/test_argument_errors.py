"""Natural mistakes in arguments end in an error that names the argument and the next step."""

import dataclasses
import inspect
import re
import warnings
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import kljax
from tests.kljax import calls

# Of numpy, as all processes import this module: each operation of JAX would be compiled.
LOG_PROBS = np.array([[-1.0, -2.0, -0.5]], np.float32)
MANY = np.tile(LOG_PROBS, (6, 1))
HIDDEN, WEIGHTS = np.ones((1, 3, 4), np.float32), np.ones((4, 8), np.float32)
TOKENS, MASK = np.array([[1, 2, 3]], np.int32), np.array([[0, 1, 1]], np.int32)


@dataclasses.dataclass
class RowMajorLinear:
    """Has its weights where modules of equinox and PyTorch have them: `weight` `[V, D]` and `bias` or None."""

    weight: Any
    bias: Any = None


# Axes are integers or tuples that numpy checks; a fill may be a boolean of a boolean array.
NOT_NUMBERS = ("axis", "fill")


@pytest.mark.parametrize("mask", [[[2, -100, 0]], [[1, -100, 1]], [[3, 0, 1]]])
@pytest.mark.parametrize("kind", [jnp.array, np.array, list], ids=["jax", "numpy", "list"])
def test_mask_of_labels_is_refused(kind: Any, mask: list[list[int]]) -> None:
    with pytest.raises(ValueError, match=r"mask: got -?\d+, expected 0 and 1 only; .* pass the positions to score"):
        kljax.estimate_kl(LOG_PROBS, LOG_PROBS, kind(mask))


def test_segments_of_labels_are_refused() -> None:
    packed = kljax.Segments(jnp.array([[2, 1, 0]]), jnp.array([[0, 0, 0]]))
    with pytest.raises(ValueError, match=r"mask\.mask: got 2, expected 0 and 1 only"):
        kljax.token_weights(packed, mode="token_mean")


@pytest.mark.parametrize("dtype", [bool, np.int8, np.uint8, np.int32])
def test_mask_of_zeros_and_ones_is_accepted(dtype: Any) -> None:
    assert kljax.masked_sum(LOG_PROBS, np.array(MASK, dtype)) == -2.5


def test_traced_mask_adds_no_operation() -> None:
    jaxpr = jax.make_jaxpr(lambda mask: kljax.masked(LOG_PROBS, mask))(MASK)
    assert [str(equation.primitive) for equation in jaxpr.eqns if "callback" in str(equation.primitive)] == []
    assert len(jaxpr.eqns) <= 2


def test_float_tokens_are_refused() -> None:
    with pytest.raises(TypeError, match=r"tokens: got dtype float\d\d, expected integer token ids"):
        kljax.token_log_probs(HIDDEN, WEIGHTS, TOKENS.astype(float), MASK)


@pytest.mark.parametrize("wrong", [-100, 8])
def test_foreign_token_is_refused_where_scored(wrong: int) -> None:
    tokens = jnp.asarray(TOKENS).at[0, 1].set(wrong)
    with pytest.raises(ValueError, match=rf"targets: got {wrong}, expected ids in \[0, 8\)"):
        kljax.log_probs_from_hidden(HIDDEN, WEIGHTS, tokens, mask=MASK)
    masked = jnp.array([[1, 0, 1]])
    assert np.isfinite(kljax.log_probs_from_hidden(HIDDEN, WEIGHTS, tokens, mask=masked).log_prob).all()


@pytest.mark.parametrize(
    "function",
    [
        lambda probs: kljax.estimate_kl(probs, MANY),
        lambda probs: kljax.estimate_kl(MANY, probs),
        lambda probs: kljax.ppo_clip_loss(MANY, probs, MANY, MANY < 0),
        lambda probs: kljax.token_ratios(MANY, probs, MANY < 0),
    ],
)
def test_probabilities_for_log_probs_are_refused(function: Any) -> None:
    with pytest.raises(ValueError, match=r"log_probs: got numbers from 0\.135 to 0\.607, expected log-probs"):
        function(jnp.exp(MANY))


@pytest.mark.parametrize("name", calls.callable_functions())
def test_text_and_bools_are_no_numbers(name: str) -> None:
    function, call = getattr(kljax, name), calls.calls_of(name)[0]
    for parameter, declared in inspect.signature(function).parameters.items():
        if not re.match(r"(float|int)\b", str(declared.annotation)) and declared.annotation not in (int, float):
            continue
        if parameter in NOT_NUMBERS:
            continue
        for wrong in ("0.1", True):
            with pytest.raises((TypeError, ValueError), match=rf"^{parameter}: "):
                call(**{parameter: wrong})


# Moves values of any kind; controllers that measure nothing.
TAKES_COMPLEX = ("shift_right", "fixed_kl", "scheduled_kl")


@pytest.mark.parametrize("name", sorted(set(calls.callable_functions()) - set(TAKES_COMPLEX)))
def test_complex_numbers_are_refused_by_name(name: str) -> None:
    call = calls.calls_of(name)[0]
    for parameter, x in call.arrays.items():
        if isinstance(x, jax.Array | np.ndarray) and jnp.issubdtype(x.dtype, jnp.floating):
            with pytest.raises(
                TypeError, match=rf"^({parameter}|entropy): got dtype complex\d+, expected real numbers"
            ):
                call({**call.arrays, parameter: np.asarray(x) + np.complex64(1j)})


def test_none_and_objects_are_refused_by_name() -> None:
    with pytest.raises(TypeError, match=r"^ref_log_probs: got None, expected an array of numbers"):
        kljax.abs_diff(LOG_PROBS, None)
    with pytest.raises(TypeError, match=r"^hidden: got None, expected an array of numbers"):
        kljax.token_log_probs(None, WEIGHTS, TOKENS, MASK)
    with pytest.raises(TypeError, match=r"^log_probs: got ndarray of dtype object, expected an array of numbers"):
        kljax.abs_diff(np.array([[None, 1.0]], object), np.ones((1, 2), np.float32))


@pytest.mark.parametrize(
    ("make_head", "advice"),
    [
        (lambda: nnx.Linear(4, 8, rngs=nnx.Rngs(0)), "kljax.Head(head.kernel, bias=head.bias)"),
        (lambda: nnx.Linear(4, 8, use_bias=False, rngs=nnx.Rngs(0)), "kljax.Head(head.kernel)"),
        (lambda: nnx.Embed(8, 4, rngs=nnx.Rngs(0)), 'kljax.Head(head.embedding, layout="vd")'),
        (lambda: RowMajorLinear(WEIGHTS.T, WEIGHTS[0]), 'kljax.Head(head.weight, bias=head.bias, layout="vd")'),
        (lambda: RowMajorLinear(WEIGHTS.T), 'kljax.Head(head.weight, layout="vd")'),
        (lambda: {"kernel": WEIGHTS, "bias": WEIGHTS[0]}, "kljax.Head(head['kernel'], bias=head['bias'])"),
        (lambda: {"params": {}}, "expected kljax.Head or its weights [D, V]"),
        (lambda: None, "None, expected kljax.Head or its weights [D, V]"),
    ],
    ids=["nnx", "nnx-no-bias", "nnx-embed", "row-major", "row-major-no-bias", "dict", "other-dict", "none"],
)
def test_module_as_head_names_its_weights(make_head: Callable[[], Any], advice: str) -> None:
    head = make_head()
    with pytest.raises(TypeError, match=f"^head: got .*{re.escape(advice)}$"):
        kljax.token_log_probs(HIDDEN, head, TOKENS, MASK)
    if head is not None:
        with pytest.raises(TypeError, match=r"^ref_head: got "):
            kljax.kl_from_hidden(HIDDEN, WEIGHTS, HIDDEN, head)


@pytest.mark.parametrize(
    ("name", "hint"),
    [
        ("kl_penalty", "other systems have it as verl/kl, verl/k1"),
        ("grpo_loss", "other systems have it as trl/grpo"),
        ("estimat_kl", "did you mean kljax.estimate_kl?"),
    ],
)
def test_unknown_attribute_asks_the_table(name: str, hint: str) -> None:
    with pytest.raises(AttributeError, match=f"no attribute '{name}'; {re.escape(hint)}"):
        getattr(kljax, name)


def test_name_of_another_system_is_explained() -> None:
    with pytest.raises(ValueError, match="trl/dapo is mode='token_mean'"):
        kljax.token_weights(MASK, mode="dapo")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="verl/kl is estimator='k1'"):
        kljax.estimate_kl(LOG_PROBS, LOG_PROBS, estimator="kl")  # type: ignore[arg-type]


def test_bound_as_clip_high_warns() -> None:
    for bound in (1.28, np.float32(1.28)):
        with pytest.warns(UserWarning, match="which bounds the ratio by 2.28; for a bound of 1.28 pass 0.28"):
            kljax.ppo_clip_loss(LOG_PROBS, LOG_PROBS, LOG_PROBS, MASK, clip_high=bound)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        kljax.ppo_clip_loss(LOG_PROBS, LOG_PROBS, LOG_PROBS, MASK, clip_high=10.0)
        # Nats and probabilities, which bound no ratio.
        for loss in (kljax.dppo_loss, kljax.gmpo_loss):
            loss(LOG_PROBS, LOG_PROBS, LOG_PROBS, MASK, clip_high=1.5)


def test_traced_number_of_groups_is_named() -> None:
    with pytest.raises(TypeError, match=r"num_groups: got a traced number, .* static_argnames"):
        jax.jit(lambda n: kljax.grpo_advantages(jnp.ones(2), jnp.array([0, 0]), num_groups=n))(1)


def test_jvp_of_tiles_names_the_implementation() -> None:
    with pytest.raises(TypeError) as error:
        jax.jvp(lambda h: kljax.token_log_probs(h, WEIGHTS, TOKENS, MASK).log_prob, (HIDDEN,), (HIDDEN,))
    assert 'implementation="reference"' in error.value.__notes__[0]


def test_float_of_weighted_sum_names_value() -> None:
    with pytest.raises(TypeError, match=r"float\(x\.value\(\)\)"):
        float(kljax.WeightedSum.zero())


def test_unmapped_axis_name_says_where_it_belongs() -> None:
    with pytest.raises(NameError) as error:
        kljax.masked_mean(LOG_PROBS, MASK, axis_name="data")
    assert "shard_map" in error.value.__notes__[0]


def test_undivided_head_error_names_the_padding() -> None:
    mesh = jax.make_mesh((2,), ("tensor",), devices=jax.devices()[:2])
    spec = jax.sharding.PartitionSpec
    sharding = kljax.HeadSharding(tokens=spec(), head=spec(None, "tensor"), mesh=mesh)
    with pytest.raises(ValueError, match=r"pad the weights to 102 and set kljax\.Head\(vocab_size=101\)"):
        kljax.token_log_probs(HIDDEN, kljax.Head(jnp.ones((4, 101)), sharding=sharding), TOKENS, MASK)
