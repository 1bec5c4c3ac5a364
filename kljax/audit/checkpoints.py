"""The audit of two checkpoints: hidden states and a head, or logits, come from functions, a few rows at a time."""

import pathlib
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from kljax._checks import check_at_least, check_choice
from kljax._typing import Array, ArrayLike
from kljax.audit._measure import Block, Options, measure
from kljax.audit.logits import host_mask
from kljax.audit.report import Audit
from kljax.log_probs import kl_from_hidden
from kljax.reference import restore_tree

__all__ = ["audit_checkpoints"]

Apply = Callable[[Any, Array], Array]
Head = Callable[[Any], Array]
LAYOUTS = ("dv", "vd")
Path = str | pathlib.Path


def audit_checkpoints(
    tokens: ArrayLike,
    mask: ArrayLike | None = None,
    *,
    apply: Apply,
    head: Head | None = None,
    head_layout: str = "dv",
    path: Path,
    ref_path: Path,
    behaviour_path: Path | None = None,
    abstract: Any = None,
    item: str | None = None,
    rows_per_call: int = 8,
    draws: int = 0,
    bootstrap: int = 1000,
    confidence: float = 0.95,
    max_ratio: float | None = 2.0,
    resample: str | None = None,
    chunk_size: int | None = None,
    key: Array | None = None,
) -> Audit:
    """The audit of `audit_logits` for weights that orbax saved, with the exact KL from hidden states and the LM head.

    The library knows nothing of models: `apply` is any function from weights and tokens, and is compiled. With `head`
    it returns hidden states, `logits = apply(params, tokens) @ head(params)`, and the KL that everything is compared
    with is `kl_from_hidden`, what the trainer calls `exact`; without it, it returns logits. The prefixes are those of
    the tokens given. What an estimator does in expectation is a sum over all tokens that could come next, so logits
    are needed as well: with `head` those of 64 positions, or of `chunk_size` if that is more, are in memory at a time.

    Args:
      tokens: `[N, T]` integers, the input of `apply`.
      mask: `[N, T]` booleans aligned with what `apply` returns, the positions to audit; None audits all.
      apply: function of weights and `[rows, T]` tokens that returns hidden states `[rows, T, D]`, or logits
        `[rows, T, V]` if there is no `head`.
      head: function of weights that returns the LM head, `[D, V]` or `[V, D]`. It knows of no cap, scale or bias of the
        logits: with one of them, return logits.
      head_layout: "dv" for a head `[D, V]`, "vd" for `[V, D]`.
      path: checkpoint of the policy.
      ref_path: checkpoint of the reference.
      behaviour_path: checkpoint of the policy that draws the tokens; None draws them from the policy.
      abstract: pytree of `jax.ShapeDtypeStruct` with shardings, the structure of the weights in every checkpoint; None
        restores what each checkpoint holds onto one device.
      item: dotted path of the subtree that holds the weights, if the checkpoints hold more than them.
      rows_per_call: rows that `apply` is called with.
      draws: see `audit_logits`, as for all that follow.
      bootstrap: see `audit_logits`.
      confidence: see `audit_logits`.
      max_ratio: see `audit_logits`.
      resample: see `audit_logits`.
      chunk_size: see `audit_logits`.
      key: see `audit_logits`.

    Returns:
      An `Audit`, on the host.

    Gradient:
      None; an audit is a report.

    Raises:
      FileNotFoundError: if there is no checkpoint at a path.
      ValueError: if a checkpoint does not fit `abstract`, `apply` returns other shapes, and as `audit_logits`.

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
      ...     apply=lambda params, tokens: jax.nn.one_hot(tokens, 5),
      ...     head=lambda params: params["table"],
      ...     path=f"{path}/policy",
      ...     ref_path=f"{path}/reference",
      ...     bootstrap=0,
      ... )
      >>> print(audit.settings["source"], audit.settings["positions"], audit.settings["vocabulary"])
      checkpoints 6 5
    """
    options = Options(draws, bootstrap, confidence, max_ratio, resample, chunk_size, key)
    check_at_least("rows_per_call", rows_per_call, 1)
    if np.ndim(tokens) != 2 or not np.size(tokens):
        raise ValueError(f"tokens: got shape {list(np.shape(tokens))}, expected [N, T] with neither of them 0")
    kept = host_mask(mask, np.shape(tokens))
    paths = [path, ref_path] if behaviour_path is None else [path, ref_path, behaviour_path]
    weights = [restore_tree(one, _abstract(one, item) if abstract is None else abstract, item=item) for one in paths]
    check_choice("head_layout", head_layout, LAYOUTS)
    heads = [] if head is None else [_head(head, one, head_layout) for one in weights]
    if len({one.shape[-1] for one in heads}) > 1:
        raise ValueError(f"head: returned {[one.shape[-1] for one in heads]} tokens, expected the same V for all")
    return measure(_blocks(apply, weights, heads, tokens, rows_per_call), kept, options, "checkpoints")


def _head(head: Head, params: Any, layout: str) -> Array:
    """The head as `[D, V]` in the precision of the audit."""
    weights = jnp.asarray(jax.jit(head)(params), float)
    if weights.ndim != 2:
        raise ValueError(f"head: returned shape {list(weights.shape)}, expected two axes")
    return weights if layout == "dv" else weights.T


def _blocks(apply: Apply, weights: list[Any], heads: list[Array], tokens: ArrayLike, rows: int) -> Iterator[Block]:
    compiled, tokens = jax.jit(apply), jnp.asarray(tokens)
    for start in range(0, len(tokens), rows):
        part = tokens[start : start + rows]
        found = [compiled(params, part) for params in weights]
        last = "D" if heads else "V"
        for i, one in enumerate(found):
            expected = (*part.shape, heads[i].shape[0] if heads else found[0].shape[-1])
            if one.shape != expected:
                like = "its head" if heads else "every checkpoint"
                raise ValueError(
                    f"apply: returned shape {list(one.shape)} for tokens {list(part.shape)}, expected "
                    f"[rows, T, {last}] with the {last} of {like}"
                )
        yield _of_hidden(found, heads) if heads else Block.of(*found)


def _of_hidden(hidden: list[Array], heads: list[Array]) -> Block:
    """Logits and exact KL of the positions that are asked for."""
    flat = [one.reshape(-1, one.shape[-1]) for one in hidden]

    def logits(positions: np.ndarray) -> list[Array]:
        return [_logits(one[positions], head) for one, head in zip(flat, heads, strict=True)]

    def kl(positions: np.ndarray) -> Array:
        return _kl(flat[0][positions], heads[0], flat[1][positions], heads[1])

    return Block((*hidden[0].shape[:2], heads[0].shape[-1]), len(hidden) == 3, logits, kl)


@jax.jit
def _logits(hidden: Array, head: Array) -> Array:
    return hidden.astype(head.dtype) @ head


@jax.jit
def _kl(hidden: Array, head: Array, ref_hidden: Array, ref_head: Array) -> Array:
    return kl_from_hidden(hidden.astype(head.dtype), head, ref_hidden.astype(head.dtype), ref_head)


def _abstract(path: Path, item: str | None) -> Any:
    """The structure that a checkpoint has on disk, each leaf whole on the first device."""
    import orbax.checkpoint as ocp

    directory = pathlib.Path(path).absolute()
    if not directory.is_dir():
        raise FileNotFoundError(f"no checkpoint at {directory}")
    with ocp.PyTreeCheckpointer() as checkpointer:
        try:
            tree = checkpointer.metadata(directory).item_metadata.tree
        except (AttributeError, FileNotFoundError, ValueError) as error:
            raise FileNotFoundError(f"no readable checkpoint at {directory}: {error}") from error
    for name in item.split(".") if item else []:
        if not isinstance(tree, dict) or name not in tree:
            raise ValueError(f"item: the checkpoint {directory} has no subtree {item!r}")
        tree = tree[name]
    here = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    return jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(tuple(leaf.shape), leaf.dtype, sharding=here), tree)
