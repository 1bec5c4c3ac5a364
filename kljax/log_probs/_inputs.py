"""Checks the arguments of the public functions and gathers them into static options and arrays."""

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple, TypeVar, get_args

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec

from kljax._checks import NUMBER, as_real, check_at_least, check_choice, check_mask, check_numbers, check_token_ids
from kljax._devices import auto_sharded
from kljax._typing import Array, ArrayLike, Direction, HeadImplementation, HeadLayout, Mask, Scalar
from kljax.log_probs._head import (
    SHAPES,
    Head,
    HeadSharding,
    Tile,
    as_head,
    device_kind,
    embed_axis,
    head_defaults,
)
from kljax.masking import shift_right

Function = Callable[["Spec", "Weights", "Constants"], dict[str, Array]]
Result = TypeVar("Result")
DIRECTIONS = get_args(Direction)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, eq=False)
class ReferenceStates:
    """Hidden states and LM head of a reference policy or teacher, and the direction of the KL to it.

    Attributes:
      hidden: `[..., D]` hidden states; leading axes as in the policy, `D` may differ.
      head: the head of the reference, a `kljax.Head` with its own bias, cap, scale, layout and padding. An array stands
        for the policy's head with other weights, its bias a constant. None is the policy's head itself, as a constant.
      direction: "reverse" for KL(policy || reference), "forward" for KL(reference || policy).

    Raises:
      ValueError: for an unknown direction.

    Example:
      >>> import jax.numpy as jnp, kljax
      >>> reference = kljax.ReferenceStates(jnp.ones((2, 3)), direction="forward")
      >>> stats = kljax.log_probs_from_hidden(jnp.ones((2, 3)), jnp.eye(3), jnp.array([0, 1]), reference=reference)
      >>> print(stats.kl)
      [0. 0.]
    """

    hidden: ArrayLike
    head: ArrayLike | Head | None = None
    direction: Direction = dataclasses.field(default="reverse", metadata={"static": True})

    def __post_init__(self) -> None:
        check_choice("reference.direction", self.direction, DIRECTIONS)


class Weights(NamedTuple):
    """Differentiable inputs: `[..., D]` hidden states, heads in their layouts, `[V]` biases; None where absent.

    A `ref_head` of None beside `ref_hidden` is the policy's head, as a constant.
    """

    hidden: Array
    head: Array
    bias: Array | None = None
    ref_hidden: Array | None = None
    ref_head: Array | None = None
    ref_bias: Array | None = None


class Constants(NamedTuple):
    """Non-differentiable inputs: `[...]` per token, `kept` `[..., K]`, the rest scalars; None where absent."""

    inverse_temperature: Array
    logit_scale: Array
    softcap: Array | None = None
    ref_logit_scale: Array | None = None
    ref_softcap: Array | None = None
    beta: Array | None = None
    targets: Array | None = None
    mask: Array | None = None
    kept: Array | None = None


@dataclasses.dataclass(frozen=True)
class Spec:
    """Static options, which a program is compiled for.

    Attributes:
      layout, ref_layout: layouts of the two heads.
      vocab_size: columns that are tokens; the columns after them are padding.
      tile: size of a tile.
      sharding: sharding over a mesh, or None.
      entropy: whether to compute entropies; `entropy_gradient`: whether they can be differentiated.
      sum_squared_probs: whether to compute the sum of the squared probabilities.
      divergence: None, "reverse", "forward" or "jsd".
      one_reduction, kernel: how the sums of a tile are computed, see `HeadDefaults`.
    """

    layout: HeadLayout
    ref_layout: HeadLayout
    vocab_size: int
    tile: Tile
    sharding: HeadSharding | None
    entropy: bool = False
    entropy_gradient: bool = False
    sum_squared_probs: bool = False
    divergence: str | None = None
    one_reduction: bool = False
    kernel: bool = False

    def specs(self) -> dict[str, PartitionSpec]:
        """Returns the spec of each field of `Weights` and `Constants` on the mesh; scalars have none."""
        assert self.sharding is not None
        tokens = self.sharding.tokens
        head = self.sharding.head
        first, second = (*head, None, None)[:2]
        bias = PartitionSpec(second if self.layout == "dv" else first)
        of_tokens = ("hidden", "ref_hidden", "inverse_temperature", "targets", "mask", "kept")
        ref_head = head if self.ref_layout == self.layout else PartitionSpec(second, first)
        heads = {"head": head, "ref_head": ref_head, "bias": bias, "ref_bias": bias}
        return heads | dict.fromkeys(of_tokens, tokens)


class CheckedCall(NamedTuple):
    """Checked arguments: static options, arrays, and the name of the implementation."""

    spec: Spec
    weights: Weights
    constants: Constants
    implementation: HeadImplementation


def statistics_dtype(weights: Weights) -> jnp.dtype:
    """Returns the type of everything after the products: float64 if any input is float64, else float32."""
    wide = any(x is not None and x.dtype == jnp.float64 for x in weights)
    return jnp.dtype(jnp.float64 if wide else jnp.float32)


def scaled_logits(
    product: Array, bias: Array | None, inverse_temperature: Array, logit_scale: Array, softcap: Array | None
) -> tuple[Array, Array]:
    """Maps `hidden @ W` to logits and to their slope, `d logits / d bias`; `d logits / d product` has the scale too.

    Args:
      product: `[..., V]`.
      bias: `[V]` or None.
      inverse_temperature: `[..., 1]`.
      logit_scale: scalar.
      softcap: scalar or None.
    """
    raw = product * logit_scale
    if bias is not None:
        raw = raw + jnp.expand_dims(bias.astype(raw.dtype), tuple(range(raw.ndim - 1)))
    if softcap is None:
        return raw * inverse_temperature, inverse_temperature
    bounded = jnp.tanh(raw / softcap)
    return bounded * (softcap * inverse_temperature), (1 - bounded * bounded) * inverse_temperature


def logit_slope(logits: Array, inverse_temperature: Array, softcap: Array | None) -> Array:
    """Returns the slope that `scaled_logits` returns beside these logits."""
    if softcap is None:
        return inverse_temperature
    # Logits of impossible tokens lie beyond the cap.
    bounded = jnp.clip(logits / (softcap * inverse_temperature), -1, 1)
    return (1 - bounded * bounded) * inverse_temperature


def as_reference(reference: Any) -> ReferenceStates | None:
    """Returns the reference; a pair `(hidden, head)` stands for the reverse KL.

    Raises:
      TypeError: for anything else, such as the hidden states alone.
    """
    if reference is None or isinstance(reference, ReferenceStates):
        return reference
    if not isinstance(reference, (tuple, list)) or len(reference) != 2:
        shape = f" of shape {list(reference.shape)}" if hasattr(reference, "shape") else ""
        raise TypeError(
            f"reference: got {type(reference).__name__}{shape}, expected (ref_hidden, ref_head), or a "
            "kljax.ReferenceStates; for the policy's own head pass (ref_hidden, None)"
        )
    return ReferenceStates(*reference)


def prepare(
    hidden: ArrayLike,
    head: ArrayLike | Head,
    *,
    targets: ArrayLike | None = None,
    mask: Mask | None = None,
    temperature: Scalar = 1.0,
    entropy: bool | str = False,
    sum_squared_probs: bool = False,
    kept_ids: ArrayLike | None = None,
    reference: ReferenceStates | None = None,
    divergence: str | None = None,
    beta: Scalar | None = None,
    targets_name: str = "targets",
    ref_names: tuple[str, str] = ("reference.hidden", "reference.head"),
    mask_name: str = "mask",
) -> CheckedCall:
    """Checks every argument and gathers them; errors have the names of the caller's arguments.

    Raises:
      ValueError: if shapes, layouts or vocabularies do not fit, or an option is unknown.
    """
    if divergence != "jsd" and divergence is not None:
        check_choice("direction", divergence, DIRECTIONS)
    if entropy not in (False, True, "constant"):
        raise ValueError(f"entropy: got {entropy!r}, expected True, False or 'constant'")
    check_at_least("temperature", temperature, 0, strict=True)
    check_numbers(beta=beta)
    if isinstance(beta, NUMBER) and not 0 < beta < 1:
        raise ValueError(f"beta: got {beta!r}, expected a number between 0 and 1; at the ends see `kl_from_hidden`")
    head = as_head(head)
    weights, vocab_size = _policy_weights(hidden, head)
    ref = head
    if reference is not None:
        ref, weights = _with_reference(head, weights, vocab_size, reference, ref_names)
    sharding = head.sharding
    if sharding is not None:
        sharding.check(head.layout, weights.hidden.shape[:-1], weights.head.shape)
    defaults = head_defaults(device_kind(sharding))
    spec = Spec(
        layout=head.layout,
        ref_layout=ref.layout,
        vocab_size=vocab_size,
        tile=defaults.tile if head.tile is None else head.tile,
        sharding=sharding,
        entropy=entropy is not False,
        entropy_gradient=entropy is True,
        sum_squared_probs=sum_squared_probs,
        divergence=divergence,
        one_reduction=defaults.one_reduction,
        kernel=defaults.kernel and head.implementation == "tile",
    )
    wide = statistics_dtype(weights)
    per_token = _per_token(weights.hidden.shape[:-1], {targets_name: targets}, {mask_name: mask}, kept_ids)
    if targets is not None:
        scored = per_token.get("mask")
        check_token_ids(targets_name, per_token["targets"], vocab_size, scored)
    inverse = _inverse_temperature(weights.hidden.shape[:-1], temperature, wide)
    scalars = {"logit_scale": head.logit_scale, "softcap": head.softcap, "beta": beta}
    if reference is not None:
        scalars |= {"ref_logit_scale": ref.logit_scale, "ref_softcap": ref.softcap}
    numbers = {name: jnp.asarray(x, wide) for name, x in scalars.items() if x is not None}
    return CheckedCall(spec, weights, Constants(inverse, **numbers, **per_token), head.implementation)


def run(call: CheckedCall, function: Function, *, shifted: bool = False) -> dict[str, Array]:
    """Calls an implementation under whichever axis types the mesh of the arrays has.

    With `shifted`, the constants belong to the tokens that the next hidden state has read: they are moved one position
    to the left, and the results back to the right.

    Raises:
      TypeError: in a `jvp` of the tiles, with the implementation that has it.
    """

    def compute(weights: Weights, constants: Constants) -> dict[str, Array]:
        if shifted:
            constants = _shifted_left(constants, weights.hidden.shape[:-1])
        stats = function(call.spec, weights, completed(call.spec, weights, constants))
        return {name: shift_right(x) for name, x in stats.items()} if shifted else stats

    try:
        return run_on_mesh(call, compute)
    except TypeError as error:
        if "forward-mode autodiff" in str(error) and call.implementation != "reference":
            error.add_note('kljax.Head(weights, implementation="reference") has forward-mode derivatives (jvp, jacfwd)')
        raise


def run_on_mesh(call: CheckedCall, compute: Callable[..., Result], per_token: tuple[Array, ...] = ()) -> Result:
    """Calls `compute(weights, constants, *per_token)` under whichever axis types the mesh of the arrays has.

    Arrays of `per_token` that have axes are split as the tokens.
    """
    if call.spec.sharding is not None:
        return compute(*_resharded(call, per_token))
    return auto_sharded(compute)(call.weights, call.constants, *per_token)


@auto_sharded
def _shift_left(array: Array) -> Array:
    """Moves `[..., T]` by one position; the last one holds 0."""
    return jnp.concatenate([array[..., 1:], jnp.zeros_like(array[..., :1])], axis=-1)


def _shifted_left(constants: Constants, leading: tuple[int, ...]) -> Constants:
    """Moves the fields per token, of these axes, one position to the left; the last position is masked."""
    mask = constants.mask
    inverse = constants.inverse_temperature
    targets = constants.targets
    if mask is None:
        mask = jnp.ones(leading, bool) if targets is None else jnp.ones_like(targets, dtype=bool)
    if inverse.ndim:
        inverse = _shift_left(inverse)
    if targets is not None:
        targets = _shift_left(targets)
    return constants._replace(targets=targets, mask=_shift_left(mask), inverse_temperature=inverse)


def _policy_weights(hidden: ArrayLike, head: Head) -> tuple[Weights, int]:
    """Returns the weights of the policy and the number of tokens of its vocabulary."""
    hidden = as_real(hidden)
    weights = as_real(head.weights)
    axis = embed_axis(head.layout)
    if weights.ndim != 2 or hidden.shape[-1:] != (weights.shape[axis],):
        raise ValueError(
            f"head: got shape {list(weights.shape)}, expected {SHAPES[head.layout]} with hidden {list(hidden.shape)} "
            f"[..., D]{_layout_hint(weights, head.layout, hidden.shape[-1:])}"
        )
    return Weights(hidden, weights, _bias("head.bias", head, weights)), _vocab_size("head", head, weights)


def _layout_hint(weights: Array, layout: HeadLayout, width: tuple[int, ...]) -> str:
    """Returns the end of an error for weights that fit in the other layout, else nothing."""
    if weights.ndim != 2 or width != (weights.shape[1 - embed_axis(layout)],):
        return ""
    other = "vd" if layout == "dv" else "dv"
    return f'; did you mean {SHAPES[other]}? Set `kljax.Head(weights, layout="{other}")`'


def _bias(name: str, head: Head, weights: Array) -> Array | None:
    if head.bias is None:
        return None
    bias = as_real(head.bias)
    columns = weights.shape[1 - embed_axis(head.layout)]
    if bias.shape != (columns,):
        raise ValueError(f"{name}: got shape {list(bias.shape)}, expected [{columns}], one per column")
    return bias


def _vocab_size(name: str, head: Head, weights: Array) -> int:
    columns = weights.shape[1 - embed_axis(head.layout)]
    if head.vocab_size is None:
        return columns
    if head.vocab_size > columns:
        raise ValueError(
            f"{name}.vocab_size: got {head.vocab_size}, expected at most the {columns} columns of the weights"
        )
    return head.vocab_size


def _with_reference(
    head: Head, weights: Weights, vocab_size: int, reference: ReferenceStates, names: tuple[str, str]
) -> tuple[Head, Weights]:
    """Returns the head of the reference, with what it takes from the policy's, and the weights of both."""
    hidden_name, head_name = names
    if isinstance(reference.hidden, (tuple, Head, ReferenceStates)):
        got = "a pair" if isinstance(reference.hidden, tuple) else f"a {type(reference.hidden).__name__}"
        raise TypeError(f"{hidden_name}: got {got}, expected hidden states [..., D]; pass the head as {head_name}")
    hidden = as_real(reference.hidden)
    if hidden.shape[:-1] != weights.hidden.shape[:-1]:
        raise ValueError(
            f"{hidden_name}: got shape {list(hidden.shape)}, expected the leading axes of hidden "
            f"{list(weights.hidden.shape)}"
        )
    if isinstance(reference.head, Head):
        ref = as_head(reference.head, head_name)
        _check_same_sharding(head, ref, head_name)
    else:
        constant = None if weights.bias is None else jax.lax.stop_gradient(weights.bias)
        ref = dataclasses.replace(head, bias=constant)
        if reference.head is not None:
            ref = dataclasses.replace(ref, weights=as_head(reference.head, head_name).weights)
    ref_weights = as_real(ref.weights)
    axis = embed_axis(ref.layout)
    if ref_weights.ndim != 2:
        raise ValueError(f"{head_name}: got shape {list(ref_weights.shape)}, expected {SHAPES[ref.layout]}")
    hint = _layout_hint(ref_weights, ref.layout, hidden.shape[-1:])
    if hidden.shape[-1] != ref_weights.shape[axis]:
        raise ValueError(
            f"{hidden_name}: got shape {list(hidden.shape)}, expected [..., D] with the D of {head_name} "
            f"{list(ref_weights.shape)} {SHAPES[ref.layout]}{hint}"
        )
    bias = _bias(f"{head_name}.bias", ref, ref_weights)
    tokens = _vocab_size(head_name, ref, ref_weights)
    if tokens != vocab_size:
        raise ValueError(
            f"{head_name}: got {tokens} tokens, expected the {vocab_size} of head; where the weights are padded, set "
            "`kljax.Head(vocab_size=...)`"
        )
    columns = weights.head.shape[1 - embed_axis(head.layout)], ref_weights.shape[1 - axis]
    if head.sharding is not None and head.sharding.head_axes(head.layout)[1] and len(set(columns)) > 1:
        raise ValueError(f"{head_name}: got {columns[1]} columns, expected the {columns[0]} of head, as V is sharded")
    shared = reference.head is None
    return ref, weights._replace(ref_hidden=hidden, ref_head=None if shared else ref_weights, ref_bias=bias)


def _check_same_sharding(head: Head, ref: Head, name: str) -> None:
    """Raises `ValueError` for a sharding of the reference's head over other axes than the policy's."""
    if ref.sharding is None:
        return
    if head.sharding is None or (ref.sharding.tokens, ref.sharding.head_axes(ref.layout)) != (
        head.sharding.tokens,
        head.sharding.head_axes(head.layout),
    ):
        raise ValueError(
            f"{name}.sharding: got {ref.sharding}, expected the axes of head.sharding, {head.sharding}; leave it out"
        )


def _per_token(
    leading: tuple[int, ...],
    targets: dict[str, ArrayLike | None],
    masks: dict[str, Mask | None],
    kept_ids: ArrayLike | None,
) -> dict[str, Array]:
    """Returns the fields of `Constants` that have a value per token, checked against the axes of the tokens."""
    arrays = {}
    for name, ids in targets.items():
        if ids is not None:
            arrays["targets"] = jnp.asarray(ids)
            got = arrays["targets"].shape
            if got != leading:
                raise ValueError(f"{name}: got shape {list(got)}, expected {list(leading)} as hidden has")
    for name, mask in masks.items():
        if mask is not None:
            arrays["mask"] = check_mask(mask, name)
            got = arrays["mask"].shape
            if got != leading:
                raise ValueError(f"{name}: got shape {list(got)}, expected {list(leading)} as hidden has")
    if kept_ids is not None:
        ids = jnp.asarray(kept_ids)
        if ids.shape[:-1] != leading or ids.ndim != len(leading) + 1:
            expected = ", ".join([*map(str, leading), "K"])
            raise ValueError(f"kept_ids: got shape {list(ids.shape)}, expected [{expected}] as hidden has")
        if not jnp.issubdtype(ids.dtype, jnp.integer):
            raise TypeError(f"kept_ids: got dtype {ids.dtype}, expected integer token ids")
        arrays["kept"] = ids
    return arrays


def _inverse_temperature(leading: tuple[int, ...], temperature: Scalar, dtype: jnp.dtype) -> Array:
    """Returns `1 / temperature`, a scalar or `[...]`."""
    array = jnp.asarray(temperature, dtype)
    if array.shape not in ((), leading):
        raise ValueError(
            f"temperature: got shape {list(array.shape)}, expected a scalar or {list(leading)} as hidden has"
        )
    return 1 / array


def completed(spec: Spec, weights: Weights, constants: Constants) -> Constants:
    """Returns the constants with targets inside the vocabulary, a temperature per token, and no gradient."""
    inverse = constants.inverse_temperature
    if constants.mask is not None:
        inverse = jnp.where(constants.mask, inverse, 1)
    targets = constants.targets
    kept_ids = constants.kept
    if targets is not None:
        targets = jnp.clip(targets, 0, spec.vocab_size - 1).astype(jnp.int32)
    if kept_ids is not None:
        kept_ids = jnp.where((kept_ids >= 0) & (kept_ids < spec.vocab_size), kept_ids, -1).astype(jnp.int32)
    inverse = jnp.broadcast_to(inverse, weights.hidden.shape[:-1])
    constants = constants._replace(inverse_temperature=inverse, targets=targets, kept=kept_ids)
    return jax.tree.map(jax.lax.stop_gradient, constants)


def _resharded(call: CheckedCall, per_token: tuple[Array, ...]) -> tuple[Any, ...]:
    """Returns the arrays resharded to `sharding`, which a mesh with explicit axes does not do by itself."""
    assert call.spec.sharding is not None
    mesh = call.spec.sharding.resolved_mesh()
    specs = call.spec.specs()
    if not any("Explicit" in str(kind) for kind in mesh.axis_types):
        return call.weights, call.constants, *per_token

    def reshard(x: Array, spec: PartitionSpec) -> Array:
        return jax.reshard(x, NamedSharding(mesh, spec)) if x.ndim else x

    def reshard_fields(fields: Any) -> Any:
        known = {name: x for name, x in fields._asdict().items() if x is not None and name in specs}
        return fields._replace(**{name: reshard(x, specs[name]) for name, x in known.items()})

    tokens = call.spec.sharding.tokens
    return reshard_fields(call.weights), reshard_fields(call.constants), *(reshard(x, tokens) for x in per_token)
