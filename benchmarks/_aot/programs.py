"""The programs that are compiled: the operation of this library, and what it is compared with, for shapes alone."""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import kljax
from benchmarks._aot.order import Problem
from benchmarks._jax_contenders import Data, Stats, forward_of, gradient_of, naive, tunix_full
from kljax.log_probs._tiles import default_tile

Array = jax.Array

TOKENS = P(("data", "fsdp"))
HEAD = P("fsdp", "tensor")


class Program(NamedTuple):
    """A function and the shapes, types and shardings of what it takes and returns."""

    run: Callable[..., tuple[Array, ...]]
    arguments: tuple[Any, ...]
    out_shardings: tuple[NamedSharding, ...]

    def lower(self) -> jax.stages.Lowered:
        return jax.jit(self.run, out_shardings=self.out_shardings).lower(*self.arguments)


def tunix_chunk(hidden: Array, head: Array, data: Data, *, rows: int, columns: int) -> Stats:
    """After `compute_chunked_logps` of google/tunix: a rematerialised scan, some `columns` of all `rows` at a time."""

    def chunks(x: Array) -> Array:
        return x.reshape(rows, -1, columns, *x.shape[1:]).swapaxes(0, 1)

    def whole(x: Array) -> Array:
        return x.swapaxes(0, 1).reshape(-1)

    @jax.checkpoint
    def step(carry: None, chunk: tuple[Array, Array]) -> tuple[None, tuple[Array, Array]]:
        def row(hidden: Array, targets: Array) -> tuple[Array, Array]:
            log_probs, entropies, _ = tunix_full(hidden, head, data._replace(targets=targets))
            assert entropies is not None
            return log_probs, entropies

        return carry, jax.vmap(row)(*chunk)

    _, (log_probs, entropies) = jax.lax.scan(step, None, (chunks(hidden), chunks(data.targets)))
    return whole(log_probs), whole(entropies), None


def tiled(
    hidden: Array,
    head: Array,
    data: Data,
    *,
    mesh: Mesh,
    tile: kljax.Tile | None,
    entropy: bool = True,
    kl: bool = False,
) -> Stats:
    """The operation of this library, with the tile of its table for the kind of device."""
    sharding = kljax.HeadSharding(mesh=mesh, tokens=TOKENS, head=HEAD) if mesh.size > 1 else None
    stats = kljax.log_probs_from_hidden(
        hidden,
        head,
        data.targets,
        entropy=entropy,
        reference=(data.ref_hidden, None) if kl else None,
        sharding=sharding,
        tile=tile or default_tile(mesh.devices.flat[0].device_kind),
        implementation="tile",
    )
    return stats.log_prob, stats.entropy, stats.kl


def build(name: str, mesh: Mesh, problem: Problem, tile: kljax.Tile | None = None) -> Program:
    """A program by name: loss and gradients to hidden states and head, unless the name says otherwise."""
    contender, _, kind = name.partition("_")
    devices = mesh.shape["data"] * mesh.shape["fsdp"]
    options: dict[str, Any] = {"kl": True} if kind == "kl" else {"entropy": False} if kind == "frozen" else {}
    stats: dict[str, Callable[..., Stats]] = {
        "naive": functools.partial(naive, **options),
        "kljax": functools.partial(tiled, mesh=mesh, tile=tile, **options),
        "tunix": functools.partial(tunix_chunk, rows=problem.rows * devices, columns=problem.chunk // problem.rows),
    }
    tokens, head, whole = (NamedSharding(mesh, spec) for spec in (TOKENS, HEAD, P()))
    outputs: tuple[NamedSharding, ...]
    if kind == "forward":
        run, outputs = forward_of(stats[contender]), (whole, tokens, tokens)
    elif kind == "frozen":
        run, outputs = gradient_of(stats[contender], head=False), (whole, tokens)
    else:
        run, outputs = gradient_of(stats[contender]), (whole, tokens, head)
    return Program(run, _arguments(problem, devices, tokens, head), outputs)


def _arguments(problem: Problem, devices: int, tokens: NamedSharding, head: NamedSharding) -> tuple[Any, ...]:
    count = problem.tokens * devices

    def per_token(dtype: Any, *width: int) -> Any:
        return jax.ShapeDtypeStruct((count, *width), dtype, sharding=tokens)

    hidden = per_token(jnp.bfloat16, problem.width)
    data = Data(per_token(jnp.int32), per_token(jnp.float32), per_token(jnp.float32), per_token(jnp.bool), hidden)
    return hidden, jax.ShapeDtypeStruct((problem.width, problem.vocab), jnp.bfloat16, sharding=head), data
