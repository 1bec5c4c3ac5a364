"""Operations of the matmuls of a compiled program, with the iterations of its loops.

`cost_analysis` of JAX counts the body of a loop once, which is off by the number of layers and more.
"""

import functools
import json
import math
import re
from collections.abc import Mapping

from train.plan.compiler.hlo import CONTROL, HloModule, Instruction, array_sizes, executions

Sizes = tuple[int, ...]
_SLOTS = {"slots_forward_kernel": 2, "slots_query_kernel": 3, "slots_key_kernel": 4}
"""Products of the kernels of `train.models.attention.triton`, which skip the keys after a query."""
_FLOPS = re.compile(r'"flops":"?(\d+)')
_CAUSAL = re.compile(r'"mask_type": ?"(?:PADDING_)?CAUSAL"')
_SLIDING = re.compile(r'"sliding_window_length": ?"?([1-9]\d*)')
_WINDOW = ("stride", "lhs_dilate", "rhs_dilate", "pad")


def count_flops(module: HloModule, expected: Mapping[str, float] | None = None) -> float:
    """Counts two operations for each multiplication of a matmul or convolution, on one device in one run.

    Kernels of attention count the products of each query with the keys that their mask leaves if every row is one
    sequence without padding; under a mask in memory all keys.

    Args:
      module: the program.
      expected: iterations of loops that depend on data, see `hlo.trip_count`.
    """
    total = 0.0
    for name, times in executions(module, kernels=False, expected=expected).items():
        if times:
            kernels = [x for x in module.computations[name] if x.opcode not in CONTROL]
            shapes = {instruction.name: instruction.shape for instruction in module.computations[name]}
            total += times * sum(kernel_flops(module, kernel, shapes) for kernel in kernels)
    return total


def kernel_flops(module: HloModule, instruction: Instruction, shapes: Mapping[str, str]) -> float:
    """Counts the operations of one execution of a kernel, with those of the computations that it is made of.

    Args:
      module: the program.
      instruction: outside kernels.
      shapes: of the values of its computation, by name.
    """
    total = _flops(instruction, shapes)
    for _, name in instruction.computations:
        inner = module.computations.get(name, ())
        inner_shapes = {part.name: part.shape for part in inner}
        total += sum(kernel_flops(module, part, inner_shapes) for part in inner)
    return total


def _flops(instruction: Instruction, shapes: Mapping[str, str]) -> float:
    if instruction.opcode not in ("dot", "convolution", "custom-call"):
        return 0
    operands = [array_sizes(shapes[name])[0] for name in instruction.operands if array_sizes(shapes.get(name, ""))]
    if instruction.opcode == "dot":
        return 2 * math.prod(_only(instruction.shape)) * _contracted(instruction.line, operands[0][1])
    if instruction.opcode == "convolution":
        return _convolution(instruction, operands[0][1], operands[1][1])
    return _custom_call(instruction, operands)


def _only(shape: str) -> Sizes:
    """Returns the sizes of the first array of a type."""
    arrays = array_sizes(shape)
    return arrays[0][1] if arrays else ()


def _contracted(line: str, left: Sizes) -> int:
    axes = re.search(r"lhs_contracting_dims=\{([\d,]*)\}", line)
    return math.prod(left[int(axis)] for axis in axes[1].split(",") if axis) if axes else 1


def _convolution(instruction: Instruction, left: Sizes, right: Sizes) -> float:
    """Counts the positions of a window that lie in the input, which are few where a TPU writes a batched matmul so."""
    labels = re.search(r"dim_labels=(\w+)_(\w+)->(\w+)", instruction.line)
    assert labels is not None, instruction.line
    match = re.search(r"window=\{([^}]*)\}", instruction.line)
    window = dict(re.findall(r"(\w+)=([\w\-]+)", match[1] if match else ""))
    output = _only(instruction.shape)
    total = 2 * left[labels[1].index("b")] * output[labels[3].index("f")] * right[labels[2].index("i")]
    groups = re.search(r"batch_group_count=(\d+)", instruction.line)
    total //= int(groups[1]) if groups else 1
    arrays = tuple(zip((left, right, output), labels.groups(), strict=True))
    for axis in range(sum(label.isdigit() for label in labels[3])):
        size, kernel, count = (array[names.index(str(axis))] for array, names in arrays)
        options = [window[name].split("x")[axis] if name in window else "" for name in _WINDOW]
        stride, base, spread = (int(option or 1) for option in options[:3])
        pad = int((options[3] or "0").split("_")[0])
        starts = [position * spread - pad for position in range(kernel)]
        total *= sum(_window_hits(start, size, count, stride, base) for start in starts)
    return total


@functools.cache
def _window_hits(start: int, size: int, output: int, stride: int, base: int) -> int:
    """Counts the outputs o that read an element of the input, at `(o * stride + start) / base`, along one axis."""
    first = max(0, -(start // stride))
    last = min(output - 1, ((size - 1) * base - start) // stride)
    period = base // math.gcd(stride, base)
    hits = (o for o in range(first, min(first + period, last + 1)) if (o * stride + start) % base == 0)
    least = next(hits, None)
    return 0 if least is None else (last - least) // period + 1


def _custom_call(instruction: Instruction, operands: list[tuple[str, Sizes]]) -> float:
    """Counts kernels: matmuls of cuBLAS, attention of cuDNN and of Triton, the head's, grouped products.

    Others, such as attention on TPUs, report themselves. A grouped product counts all rows, also of no group.
    """
    target = re.search(r'custom_call_target="([^"]*)"', instruction.line)
    name = target[1] if target else ""
    if name.startswith("__cublas$"):
        config = json.loads(re.search(r"backend_config=(\{.*\})", instruction.line)[1])  # type: ignore[index]
        axes = config["gemm_backend_config"]["dot_dimension_numbers"]["lhs_contracting_dimensions"]
        return 2 * math.prod(_only(instruction.shape)) * math.prod(operands[0][1][int(axis)] for axis in axes)
    if name.startswith("__cudnn$fmha") and len(operands) >= 2:
        (_, (rows, queries, heads, width)), (_, (_, keys, *_)) = operands[:2]
        pairs = queries * keys
        if _CAUSAL.search(instruction.line):
            window = _SLIDING.search(instruction.line)
            # Its query i attends to the keys up to key i, however many keys there are.
            pairs = _causal_pairs(queries, window=int(window[1]) if window else None)
        return 2.0 * (5 if "Backward" in name else 2) * rows * heads * pairs * width
    if name.startswith("mosaic_gpu"):
        left = next(sizes for kind, sizes in operands if kind in ("bf16", "f16"))
        return 2.0 * math.prod(left) * _only(instruction.shape)[-1]
    if name == "__gpu$xla.gpu.triton":
        if "head_sums" in instruction.op_name:
            head, (rows, _) = (sizes for kind, sizes in operands if kind == "bf16")
            return 2.0 * rows * math.prod(head)
        products = next((count for kernel, count in _SLOTS.items() if kernel in instruction.op_name), 0)
        if products:
            (_, (rows, queries, heads, width)), (_, (_, keys, *_)) = operands[:2]
            return 2.0 * products * rows * heads * _causal_pairs(queries, keys - queries) * width
    said = _FLOPS.search(instruction.line)
    return float(said[1]) if said else 0.0


@functools.cache
def _causal_pairs(queries: int, before: int = 0, window: int | None = None) -> int:
    """Counts the keys of queries that follow `before` tokens of a row, in a window of tokens."""
    seen = range(before + 1, before + queries + 1)
    return sum(seen) if window is None else sum(min(keys, window) for keys in seen)
