"""The audit of two checkpoints: logits come from a function, a few rows at a time."""

import pathlib
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from kljax._checks import check_at_least
from kljax._typing import Array, ArrayLike
from kljax.audit._measure import Block, Options, measure
from kljax.audit.logits import host_mask
from kljax.audit.report import Audit
from kljax.reference import restore_tree

__all__ = ["audit_checkpoints"]

Apply = Callable[[Any, Array], Array]
Path = str | pathlib.Path


def audit_checkpoints(
    tokens: ArrayLike,
    mask: ArrayLike | None = None,
    *,
    apply: Apply,
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
    """The audit of `audit_logits` for weights that orbax saved: `logits = apply(params, tokens)` for each checkpoint.

    The library knows nothing of models: `apply` is any function from weights and tokens to logits, and is compiled. The
    prefixes are those of the tokens given; at each position the audit goes over all tokens that could come next.

    Args:
      tokens: `[N, T]` integers, the input of `apply`.
      mask: `[N, T]` booleans aligned with the logits that `apply` returns, the positions to audit; None audits all.
      apply: function of weights and `[rows, T]` tokens that returns logits `[rows, T, V]`.
      path: checkpoint of the policy.
      ref_path: checkpoint of the reference.
      behaviour_path: checkpoint of the policy that draws the tokens; None draws them from the policy.
      abstract: pytree of `jax.ShapeDtypeStruct` with shardings, the structure of the weights in every checkpoint; None
        restores what each checkpoint holds onto one device.
      item: dotted path of the subtree that holds the weights, if the checkpoints hold more than them.
      rows_per_call: rows whose logits are in memory at a time.
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
      ...     apply=lambda params, tokens: params["table"][tokens],
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
    return measure(_blocks(apply, weights, tokens, rows_per_call), kept, options, "checkpoints")


def _blocks(apply: Apply, weights: list[Any], tokens: ArrayLike, rows: int) -> Iterator[Block]:
    compiled, tokens = jax.jit(apply), jnp.asarray(tokens)
    for start in range(0, len(tokens), rows):
        part = tokens[start : start + rows]
        logits = [compiled(params, part) for params in weights]
        for one in logits:
            if one.ndim != 3 or one.shape[:2] != part.shape or one.shape != logits[0].shape:
                raise ValueError(
                    f"apply: returned shape {list(one.shape)} for tokens {list(part.shape)}, expected [rows, T, V] "
                    "with the same V for every checkpoint"
                )
        yield logits[0], logits[1], logits[2] if len(logits) == 3 else None


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
