"""Logits of a tile and their sums in one Pallas kernel, on Hopper GPUs in bfloat16.

The compiler's product writes the logits in float32, and a reduction reads them again. A program of the kernel has the
sums of a block of columns while its logits are in registers; where nobody wants the logits, it does not write them.
"""

import functools
from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from kljax._typing import Array
from kljax.log_probs._head import device_kind, embed_axis
from kljax.log_probs._tiles import IMPOSSIBLE, Chunk, DeviceView, Tokens

if TYPE_CHECKING:
    from kljax.log_probs._forward import Sums

ROWS = 128
COLUMNS = 128
"""Block of logits of a program, which fits the registers of eight warps in float32."""
DEPTH = 64
"""Part of D of one step of its product."""
WARPS = 8
STAGES = 4
NAME = "head_sums"
"""Plans of the program find the kernel by it."""
# Offsets in an array are 32-bit integers.
_LARGEST = 2**31


def can_sum(device: DeviceView, chunk: Chunk, tokens: Tokens) -> bool:
    """Whether the kernel computes this tile: of one policy in bfloat16, without a cap, on a part that it may split."""
    spec = device.spec
    alone = tokens.ref_hidden is None and tokens.kept is None and device.constants.softcap is None
    narrow = chunk.head.dtype == jnp.bfloat16 and device.dtype == jnp.float32
    rows, embed = tokens.hidden.shape
    small = max(rows, embed) * chunk.size < _LARGEST
    # The compiler cannot split a kernel over devices, and the caller's `shard_map` may check what varies over them.
    placed = spec.sharding is not None or jax.device_count() == 1
    placed = placed and not jax.typeof(tokens.hidden).manual_axis_type.varying
    return spec.kernel and alone and narrow and small and placed and embed % DEPTH == 0


def sum_blocks(
    device: DeviceView, sums: "Sums", chunk: Chunk, tokens: Tokens, *, keep: bool
) -> tuple[dict[str, Array], Array | None]:
    """Computes the sums of blocks of columns, and with `keep` the logits, which `DeviceView.logits` would return.

    Returns:
      `[blocks, rows]` of each sum that `sums` has, with the largest logit as "max"; and `[rows, columns]`, or None.
    """
    rows = tokens.hidden.shape[0]
    names = ("max", "total", *(name for name in ("target", "entropy", "squares") if getattr(sums, name) is not None))
    inputs = {
        "hidden": tokens.hidden.astype(chunk.head.dtype),
        "head": chunk.head,
        "inverse_temperature": tokens.inverse_temperature,
        "logit_scale": jnp.broadcast_to(device.constants.logit_scale, (rows,)),
    }
    if chunk.bias is not None:
        inputs["bias"] = chunk.bias.astype(device.dtype)
    if chunk.valid is not None:
        inputs["valid"] = chunk.valid.astype(jnp.int32)
    if "target" in names:
        assert tokens.targets is not None
        inputs["target"] = tokens.targets - chunk.first_id
    interpret = device_kind(device.spec.sharding) == "cpu"
    options = KernelOptions(embed_axis(device.spec.layout), (*names, "logits") if keep else names, interpret)
    results = by_kernel(options, inputs)
    return {name: results[name] for name in names}, results.get("logits")


class KernelOptions(NamedTuple):
    """The axis of the head that is D, the names of the results, and whether a CPU runs the kernel, slowly."""

    embed: int
    names: tuple[str, ...]
    interpret: bool


@functools.partial(jax.custom_jvp, nondiff_argnums=(0,))
def by_kernel(options: KernelOptions, inputs: dict[str, Array]) -> dict[str, Array]:
    """Computes the named results of `sum_blocks` from arrays of rows and of columns."""
    from jax.experimental import pallas as pl
    from jax.experimental.pallas import triton

    rows = inputs["hidden"].shape[0]
    columns = inputs["head"].shape[1 - options.embed]
    blocks = pl.cdiv(columns, COLUMNS)
    results: dict[str, Array] = pl.pallas_call(
        functools.partial(_kernel, options.embed),
        out_shape={
            name: jax.ShapeDtypeStruct((rows, columns) if name == "logits" else (blocks, rows), jnp.float32)
            for name in options.names
        },
        # All rows of a block of columns follow each other, so that its part of the head stays in the cache.
        grid=(pl.cdiv(rows, ROWS) * blocks,),
        interpret=options.interpret,
        name=NAME,
        compiler_params=triton.CompilerParams(num_warps=WARPS, num_stages=STAGES),
    )(inputs)
    return results


@by_kernel.defjvp
def _derivative(options: KernelOptions, primals: Any, tangents: Any) -> Any:
    """Only a Hessian needs it: gradients have a pass of their own."""
    return jax.jvp(functools.partial(by_compiler, options), primals, tangents)


def by_compiler(options: KernelOptions, inputs: dict[str, Array]) -> dict[str, Array]:
    """Computes the same from an array of all logits."""
    contracted = (((1,), (options.embed,)), ((), ()))
    logits = lax.dot_general(inputs["hidden"], inputs["head"], contracted, preferred_element_type=jnp.float32)
    logits = logits * inputs["logit_scale"][:, None]
    if "bias" in inputs:
        logits += inputs["bias"]
    logits = jnp.maximum(logits * inputs["inverse_temperature"][:, None], IMPOSSIBLE)
    if "valid" in inputs:
        logits = jnp.where(inputs["valid"] != 0, logits, IMPOSSIBLE)
    width = logits.shape[1]
    blocks = -(-width // COLUMNS)
    padding = ((0, 0), (0, blocks * COLUMNS - width))
    parts = jnp.pad(logits, padding, constant_values=IMPOSSIBLE).reshape(-1, blocks, COLUMNS)
    largest = parts.max(2)
    lower = parts - largest[..., None]
    e = jnp.exp(lower)
    results = {"max": largest, "total": e.sum(2), "entropy": (e * lower).sum(2), "squares": (e * e).sum(2)}
    if "target" in inputs:
        column = jnp.arange(blocks * COLUMNS, dtype=jnp.int32).reshape(blocks, COLUMNS)
        results["target"] = jnp.where(column == inputs["target"][:, None, None], parts, 0).sum(2)
    return {name: logits if name == "logits" else results[name].T for name in options.names}


def _kernel(embed: int, inputs: dict[str, Any], outputs: dict[str, Any]) -> None:
    from jax.experimental import pallas as pl
    from jax.experimental.pallas import triton

    count, depth = inputs["hidden"].shape
    width = inputs["head"].shape[1 - embed]
    row_blocks = pl.cdiv(count, ROWS)
    block = pl.program_id(0) // row_blocks
    first_row = pl.program_id(0) % row_blocks * ROWS
    first_column = block * COLUMNS
    rows = pl.ds(first_row, ROWS)
    columns = pl.ds(first_column, COLUMNS)
    column = first_column + jnp.arange(COLUMNS, dtype=jnp.int32)
    # A mask that is always true is none.
    is_row = None if count % ROWS == 0 else first_row + jnp.arange(ROWS, dtype=jnp.int32) < count
    is_column = None if width % COLUMNS == 0 else column < width

    def read(name: str, at: Any, mask: Array | None) -> Array:
        return triton.load(inputs[name].at[at], mask=mask, other=None if mask is None else 0)

    def add(step: Array, product: Array) -> Array:
        part = pl.ds(pl.multiple_of(step * DEPTH, DEPTH), DEPTH)
        hidden = read("hidden", (rows, part), None if is_row is None else is_row[:, None])
        if embed:
            head = read("head", (columns, part), None if is_column is None else is_column[:, None]).T
        else:
            head = read("head", (part, columns), None if is_column is None else is_column[None])
        return product + _dot(hidden, head)

    product = lax.fori_loop(0, depth // DEPTH, add, jnp.zeros((ROWS, COLUMNS), jnp.float32))
    logits = product * read("logit_scale", rows, is_row)[:, None]
    if "bias" in inputs:
        logits += read("bias", columns, is_column)[None]
    logits *= read("inverse_temperature", rows, is_row)[:, None]
    # NaN stays, which a maximum of this device may drop.
    logits = jnp.where(logits < IMPOSSIBLE, IMPOSSIBLE, logits)
    counts = is_column
    if "valid" in inputs:
        valid = read("valid", columns, is_column) != 0
        counts = valid if counts is None else counts & valid
    if counts is not None:
        logits = jnp.where(counts[None], logits, IMPOSSIBLE)
    if "logits" in outputs:
        mask = is_column if is_column is None else is_column[None]
        if is_row is not None:
            mask = is_row[:, None] if mask is None else is_row[:, None] & mask
        triton.store(outputs["logits"].at[rows, columns], logits, mask=mask)
    largest = logits.max(1)
    lower = logits - largest[:, None]
    e = jnp.exp(lower)
    sums = {"max": largest, "total": e.sum(1)}
    if "target" in outputs:
        is_target = column[None] == read("target", rows, is_row)[:, None]
        if counts is not None:
            is_target &= counts[None]
        sums["target"] = jnp.where(is_target, logits, 0).sum(1)
    if "entropy" in outputs:
        sums["entropy"] = (e * lower).sum(1)
    if "squares" in outputs:
        sums["squares"] = (e * e).sum(1)
    for name, values in sums.items():
        triton.store(outputs[name].at[block, rows], values, mask=is_row)


def _dot(a: Array, b: Array) -> Array:
    """Multiplies two blocks; the module that has the product depends on the release of JAX."""
    from jax.experimental import pallas as pl
    from jax.experimental.pallas import triton

    module: Any = triton if hasattr(triton, "dot") else pl
    product: Array = module.dot(a, b)
    return product
