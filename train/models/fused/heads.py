"""Queries, keys and values from the outputs of their projections: norm, rope and layout in one pass over the data.

Left to the compiler of GPUs, the norm is an array in float32, and every slice and copy of it one more. A Pallas kernel
reads each output once and writes each head where attention reads it, and another one does the reverse for the gradient.

Shapes: R rows of W slots, N query heads, K key-value heads, H head width, O outputs of a projection. Rows may be a
prompt of P slots with G completions of C slots each, W = P + G C.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton

from train.models.attention.cudnn import HeadsOfGroups, HeadsOfRows
from train.models.sharding import axis_size, is_nvidia_bfloat16, split_by_hand

Array = jax.Array
Role = Literal["query", "key", "value"]
ROLES: tuple[Role, ...] = ("query", "key", "value")
ELEMENTS = 4096
"""Numbers of a head that a program holds: those of a block of `ELEMENTS / H` slots fit the registers of four warps."""
_OUTPUTS = ("rows", "tokens", "heads", None)


class HeadStatics(NamedTuple):
    """Arguments that are constants in the compiled kernels.

    Attributes:
      heads: N, of all devices.
      kv_heads: K.
      width: H, a power of 2.
      group: (P, C); None: rows are written as they are.
      eps: of the norm of queries and keys, if there is one.
      offset: whether the norm multiplies by `1 + scale`.
      interpret: runs the kernels anywhere, slowly.
    """

    heads: int
    kv_heads: int
    width: int
    group: tuple[int, int] | None = None
    eps: float = 1e-6
    offset: bool = False
    interpret: bool = False


def can_fuse(head_dim: int, dtype: Any) -> bool:
    """Whether the devices have these kernels: NVIDIA GPUs for heads of 32 to 256 numbers, a power of 2, in bfloat16."""
    fits = 32 <= head_dim <= 256 and head_dim.bit_count() == 1
    return fits and is_nvidia_bfloat16(dtype)


def qkv_heads(
    statics: HeadStatics, projected: Sequence[Array], scales: tuple[Array, Array] | None, cos: Array, sin: Array
) -> HeadsOfRows | HeadsOfGroups:
    """Computes heads `rope(norm(x) * scale)` of queries and keys, and those of values as they are.

    Everything is computed in float32, and rounded once.

    Args:
      statics: sizes.
      projected: outputs of the projections of queries, keys and values [R, W, O]; or one array of all, side by side.
      scales: [H] of the norms of queries and of keys; None: there are none.
      cos: [R, W, H / 2] float32, of the rope.
      sin: [R, W, H / 2].

    Returns:
      In the type of `projected`: `HeadsOfGroups` if the statics have a group.

    Gradient:
      To `projected` and `scales`; none to the rope.
    """
    if scales is not None:
        scales = scales[0].astype(jnp.float32), scales[1].astype(jnp.float32)
    return _heads(statics, tuple(projected), scales, cos, sin)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _heads(
    statics: HeadStatics, projected: tuple[Array, ...], scales: tuple[Array, Array] | None, cos: Array, sin: Array
) -> HeadsOfRows | HeadsOfGroups:
    def local(projected: tuple[Array, ...], scales: Any, cos: Array, sin: Array) -> HeadsOfRows | HeadsOfGroups:
        blocks = _Blocks.of(statics, cos)
        rows, width = cos.shape[:2]

        def shapes(count: int, queries: int, keys: int) -> list[jax.ShapeDtypeStruct]:
            sizes = [(queries, blocks.heads), (keys, blocks.kv_heads), (keys, blocks.kv_heads)]
            return [jax.ShapeDtypeStruct((count, *size, statics.width), projected[0].dtype) for size in sizes]

        if statics.group is None:
            call = blocks.call(_forward_kernel, shapes(rows, width, width), "qkv_heads")
            return HeadsOfRows(*call(projected, scales, cos, sin))
        prompt, length = statics.group
        outputs = [shapes(rows, prompt, prompt), shapes(rows * blocks.completions, length, prompt + length)]
        prompts, completions = blocks.call(_forward_kernel, outputs, "qkv_heads")(projected, scales, cos, sin)
        return HeadsOfGroups(HeadsOfRows(*prompts), HeadsOfRows(*completions))

    return _over_mesh(local)(projected, scales, cos, sin)


def _forward(statics: HeadStatics, *arguments: Any) -> tuple[HeadsOfRows | HeadsOfGroups, tuple[Any, ...]]:
    return _heads(statics, *arguments), arguments


def _backward(statics: HeadStatics, kept: tuple[Any, ...], gradients: HeadsOfRows | HeadsOfGroups) -> tuple[Any, ...]:
    cos = kept[2]

    def local(
        projected: tuple[Array, ...], scales: Any, cos: Array, sin: Array, gradients: HeadsOfRows | HeadsOfGroups
    ) -> Any:
        blocks = _Blocks.of(statics, cos)
        outputs: list[Any] = [[jax.ShapeDtypeStruct(x.shape, x.dtype) for x in projected]]
        if scales is not None:
            counts = blocks.heads, blocks.kv_heads
            sizes = [(len(cos), blocks.per_row, count, statics.width) for count in counts]
            outputs.append([jax.ShapeDtypeStruct(size, jnp.float32) for size in sizes])
        call = blocks.call(_backward_kernel, outputs, "qkv_heads_gradient")
        return call(projected, scales, cos, sin, gradients)

    d_projected, *d_scales = _over_mesh(local)(*kept, gradients)
    sums = tuple(x.sum((0, 1, 2)) for x in d_scales[0]) if d_scales else None
    return tuple(d_projected), sums, jnp.zeros_like(cos), jnp.zeros_like(cos)


_heads.defvjp(_forward, _backward)


def _over_mesh(local: Callable[..., Any]) -> Callable[..., Any]:
    """Runs a function on every device's own rows, slots and heads."""

    def run(projected: Any, scales: Any, cos: Array, sin: Array, *gradients: Any) -> Any:
        rope = ("rows", "tokens")
        axes = (_OUTPUTS[:3], (), rope, rope, *(_OUTPUTS for _ in gradients))
        return split_by_hand(local, axes, _OUTPUTS[:3])(projected, scales, cos, sin, *gradients)

    return run


class _Blocks(NamedTuple):
    """The programs of a kernel: a block of slots of one sequence, and one head, each.

    Attributes:
      heads, kv_heads: N and K of this device.
      slots: of a block.
      prompt: P, of rows as they are W.
      length: C, 0 of rows as they are.
      completions: G.
    """

    statics: HeadStatics
    rows: int
    heads: int
    kv_heads: int
    slots: int
    prompt: int
    length: int
    completions: int

    @classmethod
    def of(cls, statics: HeadStatics, cos: Array) -> "_Blocks":
        """Takes the sizes of this device from the rope of its slots."""
        rows, width = cos.shape[:2]
        ways = axis_size("heads")
        heads = statics.heads // ways, statics.kv_heads // ways
        prompt, length = statics.group or (width, 0)
        completions = (width - prompt) // length if length else 0
        return cls(statics, rows, *heads, ELEMENTS // statics.width, prompt, length, completions)

    @property
    def per_row(self) -> int:
        """Blocks of a row."""
        return pl.cdiv(self.prompt, self.slots) + self.completions * pl.cdiv(self.length, self.slots)

    def columns(self, role: Role, sources: Sequence[Any]) -> tuple[Any, int, int, int]:
        """Returns the array with the outputs of a role, its first column there, its first program and its heads."""
        number = ROLES.index(role)
        counts = self.heads, self.kv_heads, self.kv_heads
        first = sum(counts[:number])
        if len(sources) == 1:
            return sources[0], first * self.statics.width, first, counts[number]
        return sources[number], 0, first, counts[number]

    def call(self, kernel: Callable[..., None], outputs: Any, name: str) -> Callable[..., Any]:
        """Wraps a kernel over all blocks of rows and heads."""
        return pl.pallas_call(
            functools.partial(kernel, self),
            out_shape=outputs,
            grid=(self.rows, self.per_row, self.heads + 2 * self.kv_heads),
            interpret=self.statics.interpret,
            compiler_params=triton.CompilerParams(num_warps=4, num_stages=1),
            name=name,
        )


class _Place(NamedTuple):
    """Where a program is: its row, its first slot in the row, and in a sequence; the rows there, and its real slots."""

    row: Array
    first: Array
    offset: Array
    target: Array
    real: Array

    @classmethod
    def of(cls, blocks: _Blocks, row: Array, block: Array, *, completion: bool) -> "_Place":
        """Finds the place of a block of a row, which is in a prompt or in a completion."""
        size = blocks.prompt
        first = offset = block * blocks.slots
        target = row
        if completion:
            size = blocks.length
            per_completion = pl.cdiv(size, blocks.slots)
            number = block - pl.cdiv(blocks.prompt, blocks.slots)
            which = lax.div(number, jnp.int32(per_completion))
            offset = lax.rem(number, jnp.int32(per_completion)) * blocks.slots
            first = blocks.prompt + which * size + offset
            target = row * blocks.completions + which
        return cls(row, first, offset, target, offset + jnp.arange(blocks.slots) < size)


def _read(ref: Any, row: Any, first: Any, real: Array, *columns: Any) -> Array:
    """Reads columns of a block of slots, as float32."""
    at = ref.at[(row, pl.ds(first, len(real)), *columns)]
    return triton.load(at, mask=real[:, None], other=0).astype(jnp.float32)


def _write(ref: Any, row: Any, first: Any, real: Array, *columns: Any, values: Array) -> None:
    at = ref.at[(row, pl.ds(first, len(real)), *columns)]
    triton.store(at, values.astype(ref.dtype), mask=jnp.broadcast_to(real[:, None], values.shape))


def _halves(width: int, first: Any = 0) -> tuple[Any, Any]:
    return pl.ds(first, width // 2), pl.ds(first + width // 2, width // 2)


def decode_heads(
    statics: HeadStatics,
    projected: Sequence[Array],
    scales: tuple[Array, Array] | None,
    cos: Array,
    sin: Array,
    cache: tuple[Array, Array],
    column: Array,
    *,
    prompts: int,
) -> tuple[Array, Array, Array, Array]:
    """Computes `qkv_heads` of one token a row, and writes keys and values into a cache, in its place.

    Args:
      statics: sizes; without a group.
      projected: [B, 1, O], of B rows.
      scales: as of `qkv_heads`.
      cos: [B, 1, H / 2].
      sin: [B, 1, H / 2].
      cache: keys [B, K, H, S] and values [B, K, S, H].
      column: int32 scalar, the column to write.
      prompts: R, a divisor of B: rows of a prompt come one after the other.

    Returns:
      Queries by row [B, K, N / K, H] and by prompt [R, K, B / R N / K, H], and the new keys and values.
    """

    def local(projected: Any, scales: Any, cos: Array, sin: Array, keys: Array, values: Array, column: Array) -> Any:
        blocks = _Blocks.of(statics, cos)
        rows = len(cos)
        per_key = blocks.heads // blocks.kv_heads
        count = prompts // axis_size("rows")
        shapes = [(rows, blocks.kv_heads, per_key), (count, blocks.kv_heads, rows // count * per_key)]
        outputs = [jax.ShapeDtypeStruct((*shape, statics.width), projected[0].dtype) for shape in shapes]
        operands = projected, scales, cos[:, 0], sin[:, 0], column[None], keys, values
        places = len(jax.tree.leaves(operands))
        return pl.pallas_call(
            functools.partial(_decode_kernel, blocks, rows // count),
            out_shape=[*outputs, *(jax.ShapeDtypeStruct(x.shape, x.dtype) for x in (keys, values))],
            grid=(rows, blocks.heads + 2 * blocks.kv_heads),
            input_output_aliases={places - 2: 2, places - 1: 3},
            interpret=statics.interpret,
            compiler_params=triton.CompilerParams(num_warps=1, num_stages=1),
            name="decode_heads",
        )(*operands)

    rows = ("rows",)
    by_head = ("rows", "kv_heads")
    axes = ((*rows, "heads"), (), rows, rows, by_head, by_head, ())
    run = split_by_hand(local, axes, by_head)
    by_row, by_prompt, keys, values = run(tuple(x[:, 0] for x in projected), scales, cos, sin, *cache, column)
    return by_row, by_prompt, keys, values


def _decode_kernel(
    blocks: _Blocks,
    group: int,
    projected: Any,
    scales: Any,
    cos: Any,
    sin: Any,
    column: Any,
    old_keys: Any,
    old_values: Any,
    by_row: Any,
    by_prompt: Any,
    keys: Any,
    values: Any,
) -> None:
    del old_keys, old_values
    row, head = map(pl.program_id, range(2))
    statics = blocks.statics
    per_key = blocks.heads // blocks.kv_heads
    at = column[0]

    def run(role: Role) -> None:
        source, first_column, first_head, _ = blocks.columns(role, projected)
        number = head - first_head
        halves = _halves(statics.width, first_column + number * statics.width)
        first, second = (source[row, part].astype(jnp.float32)[None] for part in halves)
        if role != "value":
            if scales is not None:
                first, second, *factors, _ = _normed(blocks, scales[ROLES.index(role)], first, second)
                first *= factors[0]
                second *= factors[1]
            c = cos[row, :][None]
            s = sin[row, :][None]
            first, second = first * c - second * s, second * c + first * s
        for part, numbers in zip(_halves(statics.width), (first[0], second[0]), strict=True):
            rounded = numbers.astype(keys.dtype)
            if role == "key":
                keys[row, number, part, at] = rounded
            elif role == "value":
                values[row, number, at, part] = rounded
            else:
                key_head = lax.div(number, jnp.int32(per_key))
                place = lax.rem(number, jnp.int32(per_key))
                prompt = lax.div(row, jnp.int32(group))
                by_row[row, key_head, place, part] = rounded
                by_prompt[prompt, key_head, lax.rem(row, jnp.int32(group)) * per_key + place, part] = rounded

    for role in ROLES:
        _, _, first, count = blocks.columns(role, (None,))
        pl.when((head >= first) & (head < first + count))(functools.partial(run, role))


def _in_each_role(blocks: _Blocks, run: Callable[[Role, bool], None]) -> None:
    """Runs a function with the role of the head of this program, and whether its block is in a completion."""
    head = pl.program_id(2)
    in_prompt = pl.program_id(1) < pl.cdiv(blocks.prompt, blocks.slots)
    for role in ROLES:
        _, _, first, count = blocks.columns(role, (None,))
        here = (head >= first) & (head < first + count)
        if not blocks.completions:
            pl.when(here)(functools.partial(run, role, False))
            continue
        pl.when(here & in_prompt)(functools.partial(run, role, False))
        pl.when(here & jnp.logical_not(in_prompt))(functools.partial(run, role, True))


def _normed(blocks: _Blocks, scale: Any, first: Array, second: Array) -> tuple[Array, ...]:
    """Returns both halves of heads over their root mean square, those of the scale [1, H / 2], and the inverse."""
    statics = blocks.statics
    mean = (jnp.sum(first * first, -1) + jnp.sum(second * second, -1)) / statics.width
    inverse = lax.rsqrt(mean + statics.eps)[:, None]
    offset = 1 if statics.offset else 0
    scales = (scale[part][None].astype(jnp.float32) + offset for part in _halves(statics.width))
    return first * inverse, second * inverse, *scales, inverse


def _forward_kernel(blocks: _Blocks, projected: Any, scales: Any, cos: Any, sin: Any, *outputs: Any) -> None:
    row, block, head = map(pl.program_id, range(3))
    statics = blocks.statics
    to_rows = HeadsOfRows(*outputs) if statics.group is None else None
    to_groups = None if statics.group is None else HeadsOfGroups(*(HeadsOfRows(*part) for part in outputs))

    def run(role: Role, completion: bool) -> None:
        place = _Place.of(blocks, row, block, completion=completion)
        source, column, first_head, _ = blocks.columns(role, projected)
        number = head - first_head
        halves = _halves(statics.width, column + number * statics.width)
        first, second = (_read(source, place.row, place.first, place.real, part) for part in halves)
        if role != "value":
            if scales is not None:
                first, second, *factors, _ = _normed(blocks, scales[ROLES.index(role)], first, second)
                first *= factors[0]
                second *= factors[1]
            c, s = (_read(table, place.row, place.first, place.real, slice(None)) for table in (cos, sin))
            first, second = first * c - second * s, second * c + first * s
        for part, values in zip(_halves(statics.width), (first, second), strict=True):
            write = functools.partial(_write, values=values)
            if to_groups is None:
                write(getattr(to_rows, role), place.row, place.first, place.real, number, part)
                continue
            output = getattr(to_groups.completions, role)
            if completion:
                offset = place.offset + (0 if role == "query" else blocks.prompt)
                write(output, place.target, offset, place.real, number, part)
                continue
            write(getattr(to_groups.prompts, role), place.row, place.offset, place.real, number, part)
            for which in range(0 if role == "query" else blocks.completions):
                target = place.row * blocks.completions + which
                write(output, target, place.offset, place.real, number, part)

    _in_each_role(blocks, run)


def _backward_kernel(
    blocks: _Blocks,
    projected: Any,
    scales: Any,
    cos: Any,
    sin: Any,
    gradients: HeadsOfRows | HeadsOfGroups,
    *outputs: Any,
) -> None:
    row, block, head = map(pl.program_id, range(3))
    statics = blocks.statics
    d_projected, *d_scales = outputs

    def gradient(role: Role, completion: bool, place: _Place, number: Any, part: Any) -> Array:
        if isinstance(gradients, HeadsOfRows):
            return _read(getattr(gradients, role), place.row, place.first, place.real, number, part)
        of_rows = getattr(gradients.completions, role)
        if completion:
            offset = place.offset + (0 if role == "query" else blocks.prompt)
            return _read(of_rows, place.target, offset, place.real, number, part)
        total = _read(getattr(gradients.prompts, role), place.row, place.offset, place.real, number, part)
        for which in range(0 if role == "query" else blocks.completions):
            total += _read(of_rows, place.row * blocks.completions + which, place.offset, place.real, number, part)
        return total

    def run(role: Role, completion: bool) -> None:
        place = _Place.of(blocks, row, block, completion=completion)
        source, column, first_head, _ = blocks.columns(role, projected)
        output = blocks.columns(role, d_projected)[0]
        number = head - first_head
        first, second = (gradient(role, completion, place, number, part) for part in _halves(statics.width))
        halves = _halves(statics.width, column + number * statics.width)
        if role != "value":
            c, s = (_read(table, place.row, place.first, place.real, slice(None)) for table in (cos, sin))
            first, second = first * c + second * s, second * c - first * s
            if scales is not None:
                x, y = (_read(source, place.row, place.first, place.real, part) for part in halves)
                x, y, *factors, inverse = _normed(blocks, scales[ROLES.index(role)], x, y)
                of_role = d_scales[0][ROLES.index(role)]
                for part, values in zip(_halves(statics.width), (first * x, second * y), strict=True):
                    of_role[place.row, block, number, part] = jnp.sum(values, 0)
                first *= factors[0]
                second *= factors[1]
                mean = ((jnp.sum(first * x, -1) + jnp.sum(second * y, -1)) / statics.width)[:, None]
                first = inverse * (first - x * mean)
                second = inverse * (second - y * mean)
        for part, values in zip(halves, (first, second), strict=True):
            _write(output, place.row, place.first, place.real, part, values=values)

    _in_each_role(blocks, run)
