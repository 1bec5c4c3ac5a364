"""Functions of the library over a mesh of all devices of several processes, in float64.

Each process computes the same on one of its own devices, and compares: within 1e-10, relative to the largest number.
"""

import functools
from collections.abc import Callable
from typing import Any, get_args

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import kljax
from train.distributed import global_arrays
from train.models.sharding import make_mesh

ROWS, LENGTH, WIDTH, VOCAB, GROUPS = 16, 6, 8, 24, 4
TOLERANCE = 1e-10
SPLIT = ("data", "fsdp")
MESHES = ((2, 2, 2), (1, 8, 1))
Arrays = dict[str, Any]


def draw() -> tuple[Arrays, Arrays]:
    """Draws arrays with rows, the same in every process, and the heads of policy and reference."""
    rng = np.random.default_rng(0)
    rows = {
        "hidden": rng.normal(size=(ROWS, LENGTH, WIDTH)),
        "ref_hidden": rng.normal(size=(ROWS, LENGTH, WIDTH)),
        "targets": rng.integers(0, VOCAB, (ROWS, LENGTH)),
        "mask": rng.random((ROWS, LENGTH)) < 0.7,
        "values": rng.normal(size=(ROWS, LENGTH)),
        "rewards": rng.normal(size=ROWS),
        # Completions of a prompt lie on several devices.
        "groups": np.arange(ROWS) % GROUPS,
    }
    return rows, {name: rng.normal(size=(WIDTH, VOCAB)) for name in ("head", "ref_head")}


def from_hidden(rows: Arrays, heads: Arrays, *, mesh: Mesh | None) -> Arrays:
    """The statistics of tokens, a loss of them, and their gradients; over a mesh, the vocabulary is split too."""
    sharding = None if mesh is None else kljax.HeadSharding(tokens=P(SPLIT), head=P("fsdp", "tensor"), mesh=mesh)

    def token_loss(stats: kljax.TokenStats, inputs: Arrays) -> Any:
        return inputs["values"] * stats.log_prob + 0.3 * stats.kl - 0.1 * stats.entropy, {"kl": stats.kl}

    def losses(hidden: jax.Array, heads: Arrays) -> Any:
        policy, reference = (kljax.Head(heads[name], sharding=sharding) for name in ("head", "ref_head"))
        states = kljax.ReferenceStates(rows["ref_hidden"], reference)
        options = {"mask": rows["mask"], "temperature": 0.8, "entropy": True, "reference": states}
        stats = kljax.log_probs_from_hidden(hidden, policy, rows["targets"], **options)
        inputs = {"values": rows["values"]}
        fused, metrics = kljax.token_loss_from_hidden(
            hidden, policy, rows["targets"], token_loss, inputs, token_chunk=4, **options
        )
        tiled = token_loss(stats, inputs)[0].sum()
        return tiled + 2 * fused, {"log_prob": stats.log_prob, "entropy": stats.entropy, "fused": fused, **metrics}

    (_, actual), gradients = jax.value_and_grad(losses, argnums=(0, 1), has_aux=True)(rows["hidden"], heads)
    return {**actual, "hidden": gradients[0], **gradients[1]}


def over_rows(rows: Arrays, *, axis_name: tuple[str, ...] | None) -> Arrays:
    """Functions with statistics of all rows: whitening, advantages, and each reduction as token weights."""
    values, mask = rows["values"], rows["mask"]
    groups = kljax.Groups(rows["groups"], GROUPS, axis_name=axis_name)
    actual = {
        "whitened": kljax.masked_whiten(values, mask, axis_name=axis_name),
        "mean": jnp.broadcast_to(kljax.masked_mean(values, mask, axis_name=axis_name), mask.shape),
        "grpo": kljax.grpo_advantages(rows["rewards"], groups),
        "rloo": kljax.rloo_advantages(rows["rewards"], groups),
    }
    for mode in get_args(kljax.aggregation.Reduction):
        options: Arrays = {"max_length": 9} if "norm" in mode else {}
        if "prompt" in mode:
            options |= {"group_ids": groups}
        actual[mode] = kljax.token_weights(mask, mode=mode, axis_name=axis_name, **options)
    return actual


def compare(name: str, got: Any, expected: Any) -> None:
    """Compares arrays with those of one device."""
    for key, item in global_arrays.to_host(expected).items():
        want, actual = np.asarray(item), np.asarray(global_arrays.to_host(got[key]))
        assert actual.dtype == want.dtype == np.float64, (name, key, actual.dtype)
        far = np.abs(actual - want).max() / np.abs(want).max()
        assert far <= TOLERANCE, (name, key, far)


def check(shape: tuple[int, int, int], expected: tuple[Arrays, Arrays]) -> None:
    """Computes all functions on a mesh of all devices, and compares."""
    mesh = make_mesh(*shape)
    rows, heads = draw()
    sharding = NamedSharding(mesh, P(SPLIT))
    local_rows = global_arrays.held_rows(sharding, ROWS)
    placed = global_arrays.place_rows({name: array[local_rows] for name, array in rows.items()}, sharding)
    columns = global_arrays.place_whole(heads, NamedSharding(mesh, P("fsdp", "tensor")))
    mapped: Callable[..., Any] = jax.shard_map(
        functools.partial(over_rows, axis_name=SPLIT), mesh=mesh, in_specs=P(SPLIT), out_specs=P(SPLIT)
    )
    with jax.set_mesh(mesh):
        compare(
            f"{shape} from hidden states",
            jax.jit(functools.partial(from_hidden, mesh=mesh))(placed, columns),
            expected[0],
        )
        compare(f"{shape} over rows", jax.jit(mapped)(placed), expected[1])


def check_all() -> None:
    """Checks every mesh."""
    rows, heads = draw()
    expected = (
        jax.jit(functools.partial(from_hidden, mesh=None))(rows, heads),
        jax.jit(functools.partial(over_rows, axis_name=None))(rows),
    )
    for shape in MESHES:
        check(shape, expected)
