"""Audits two checkpoints: functions compute hidden states and an LM head, or logits, a few rows at a time."""

import dataclasses
import pathlib
from collections.abc import Callable, Iterator
from typing import Any, get_args

import jax
import jax.numpy as jnp
import numpy as np

from kljax._checks import check_at_least, check_choice
from kljax._typing import Array, ArrayLike, HeadLayout
from kljax.checkpoint import read_metadata, restore
from kljax.log_probs import kl_from_hidden
from kljax.tools.audit.logits import AuditOptions, Block, host_mask, measure
from kljax.tools.audit.report import Audit

__all__ = ["Checkpoints", "audit_checkpoints"]

Apply = Callable[[Any, Array], Array]
Head = Callable[[Any], Array]
LAYOUTS = get_args(HeadLayout)
Path = str | pathlib.Path


def audit_checkpoints(
    tokens: ArrayLike,
    mask: ArrayLike | None = None,
    *,
    checkpoints: "Checkpoints",
    apply: Apply,
    head: Head | None = None,
    head_layout: str = "dv",
    rows_per_call: int = 8,
    draws: int = 0,
    bootstrap: int = 1000,
    confidence: float = 0.95,
    max_ratio: float | None = 2.0,
    resample: str | None = None,
    chunk_size: int | None = None,
    key: Array | None = None,
) -> Audit:
    """Runs `audit_logits` on weights that orbax saved, with the exact KL from hidden states and the LM head.

    The library knows no models: `apply` is any function of weights and tokens, and is compiled. With `head` it returns
    hidden states, `logits = apply(params, tokens) @ head(params)`, and the exact KL is `kl_from_hidden`, the one that
    the trainer calls `exact`. Without `head` it returns logits. The prefixes come from `tokens`. The expectation of
    an estimator is a sum over all next tokens, so it needs logits too: with `head`, the logits of 64 positions, or of
    `chunk_size` if that is more, are in memory at a time.

    Args:
      tokens: `[N, T]` integers, the input of `apply`.
      mask: `[N, T]` booleans aligned with the result of `apply`, the positions to audit; None audits all.
      checkpoints: the weights of the policy, of the reference and, if it is another, of the policy that draws.
      apply: function of weights and `[rows, T]` tokens that returns hidden states `[rows, T, D]`, or logits
        `[rows, T, V]` if there is no `head`.
      head: function of weights that returns the LM head, `[D, V]` or `[V, D]`. It has no cap, scale or bias of the
        logits; for a model with one of them, return logits.
      head_layout: "dv" for a head `[D, V]`, "vd" for `[V, D]`.
      rows_per_call: rows per call of `apply`.
      draws: see `audit_logits`, as for all further arguments.
      bootstrap: see `audit_logits`.
      confidence: see `audit_logits`.
      max_ratio: see `audit_logits`.
      resample: see `audit_logits`.
      chunk_size: see `audit_logits`.
      key: see `audit_logits`.

    Returns:
      An `Audit`, on the host.

    Raises:
      FileNotFoundError: if there is no checkpoint at a path.
      ValueError: if a checkpoint does not fit its `abstract` tree, `apply` returns other shapes, and as `audit_logits`.

    References:
      As `audit_logits`; Orbax, checkpointing PyTrees.

    Example:
      >>> import tempfile, jax, jax.numpy as jnp, kljax, orbax.checkpoint as ocp
      >>> path = tempfile.mkdtemp()
      >>> with ocp.PyTreeCheckpointer() as checkpointer:
      ...     for name, seed in (("policy", 0), ("reference", 1)):
      ...         checkpointer.save(f"{path}/{name}", {"table": jax.random.normal(jax.random.key(seed), (5, 5))})
      >>> audit = kljax.audit.audit_checkpoints(
      ...     jnp.array([[0, 1, 2], [3, 4, 0]]),
      ...     checkpoints=kljax.audit.Checkpoints(f"{path}/policy", f"{path}/reference"),
      ...     apply=lambda params, tokens: jax.nn.one_hot(tokens, 5),
      ...     head=lambda params: params["table"],
      ...     bootstrap=0,
      ... )
      >>> print(audit.settings["source"], audit.settings["positions"], audit.settings["vocabulary"])
      checkpoints 6 5
    """
    options = AuditOptions(draws, bootstrap, confidence, max_ratio, resample, chunk_size, key)
    check_at_least("rows_per_call", rows_per_call, 1)
    if np.ndim(tokens) != 2 or not np.size(tokens):
        raise ValueError(f"tokens: got shape {list(np.shape(tokens))}, expected [N, T] with neither of them 0")
    positions = host_mask(mask, np.shape(tokens))
    weights = checkpoints.restore()
    check_choice("head_layout", head_layout, LAYOUTS)
    heads = [] if head is None else [_head(head, params, head_layout) for params in weights]
    if len({weight.shape[-1] for weight in heads}) > 1:
        raise ValueError(f"head: got {[weight.shape[-1] for weight in heads]} tokens, expected the same V for all")
    return measure(_blocks(apply, weights, heads, tokens, rows_per_call), positions, options, "checkpoints")


@dataclasses.dataclass(frozen=True)
class Checkpoints:
    """The checkpoints of an audit: directories that orbax wrote, and the weights inside them.

    Attributes:
      policy: checkpoint of the policy.
      reference: checkpoint of the reference.
      behaviour: checkpoint of the policy that draws the tokens; None draws them from the policy.
      item: dotted path of the weights inside each checkpoint; None if the checkpoint is the weights.
      abstract: pytree of `jax.ShapeDtypeStruct` with shardings, the structure of the weights in every checkpoint; None
        restores the structure on disk onto one device.

    Example:
      >>> import kljax
      >>> kljax.audit.Checkpoints("runs/a/200", "runs/a/0", item="params").behaviour is None
      True
    """

    policy: Path
    reference: Path
    behaviour: Path | None = None
    item: str | None = None
    abstract: Any = None

    def restore(self) -> list[Any]:
        """Restores the weights of the policy, of the reference and, if it is another, of the policy that draws.

        Returns:
          Two or three pytrees of arrays, in this order.

        Raises:
          FileNotFoundError: if there is no checkpoint at a path.
          ValueError: if a checkpoint does not fit `abstract`.
        """
        paths = [path for path in (self.policy, self.reference, self.behaviour) if path is not None]
        return [self._restore(path) for path in paths]

    def _restore(self, path: Path) -> Any:
        metadata = read_metadata(path)
        abstract = self.abstract
        if abstract is None:
            device = jax.sharding.SingleDeviceSharding(jax.devices()[0])
            abstract = jax.tree.map(
                lambda leaf: jax.ShapeDtypeStruct(tuple(leaf.shape), leaf.dtype, sharding=device),
                metadata.subtree(self.item),
            )
        return restore(metadata, abstract, item=self.item)


def _head(head: Head, params: Any, layout: str) -> Array:
    """Returns the LM head as `[D, V]` in the precision of the audit."""
    weights = jnp.asarray(jax.jit(head)(params), float)
    if weights.ndim != 2:
        raise ValueError(f"head: got shape {list(weights.shape)}, expected two axes")
    return weights if layout == "dv" else weights.T


def _blocks(apply: Apply, weights: list[Any], heads: list[Array], tokens: ArrayLike, rows: int) -> Iterator[Block]:
    compiled = jax.jit(apply)
    tokens = jnp.asarray(tokens)
    for start in range(0, len(tokens), rows):
        part = tokens[start : start + rows]
        outputs = [compiled(params, part) for params in weights]
        last = "D" if heads else "V"
        for i, output in enumerate(outputs):
            expected = (*part.shape, heads[i].shape[0] if heads else outputs[0].shape[-1])
            if output.shape != expected:
                same = "its head" if heads else "every checkpoint"
                raise ValueError(
                    f"apply: got shape {list(output.shape)} for tokens {list(part.shape)}, expected "
                    f"[rows, T, {last}] with the {last} of {same}"
                )
        yield _hidden_block(outputs, heads) if heads else Block.of(*outputs)


def _hidden_block(hidden: list[Array], heads: list[Array]) -> Block:
    """Makes a block that computes logits and the exact KL of a few positions from hidden states."""
    flat = [states.reshape(-1, states.shape[-1]) for states in hidden]

    def logits(positions: np.ndarray) -> list[Array]:
        return [_logits(states[positions], head) for states, head in zip(flat, heads, strict=True)]

    def kl(positions: np.ndarray) -> Array:
        return _kl(flat[0][positions], heads[0], flat[1][positions], heads[1])

    return Block((*hidden[0].shape[:2], heads[0].shape[-1]), len(hidden) == 3, logits, kl)


@jax.jit
def _logits(hidden: Array, head: Array) -> Array:
    return hidden.astype(head.dtype) @ head


@jax.jit
def _kl(hidden: Array, head: Array, ref_hidden: Array, ref_head: Array) -> Array:
    return kl_from_hidden(hidden.astype(head.dtype), head, ref_hidden.astype(head.dtype), ref_head)
