"""The Pallas kernels of a layer and the head against their formulas in float32, before anything is timed here."""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

import kljax
from benchmarks.harness.measure import relative_distance
from benchmarks.suites.accelerator import work
from kljax.log_probs._kernel import DEPTH, KernelOptions, by_compiler, by_kernel
from train.models import Decoder, DecoderConfig, LoraConfig
from train.models.attention.cudnn import split_groups
from train.models.config import Kernels
from train.models.fused import gated, heads, norms
from train.models.parameters import bind, init_adapter, init_params
from train.models.rope import CosSin, apply_rope
from train.models.sharding import device_kind, make_mesh
from train.sequences.forest import group_forest

Array = jax.Array
Form = Callable[..., Any]
SWITCH: tuple[Kernels, ...] = ("auto", "xla")
# A kernel computes in float32 and rounds its results to bfloat16 once.
TOLERANCE = 2**-8
# Layers round at every product: their mean distance from float32 over that of the compiler's form.
OF_COMPILER = 1.1


@dataclasses.dataclass(frozen=True)
class KernelSizes:
    """Rows of a prompt and completions, and the sizes of a layer."""

    rows: int = 4
    prompt: int = 256
    completion: int = 768
    samples: int = 8
    heads: int = 16
    kv_heads: int = 8
    head_dim: int = 128
    width: int = 1024
    mlp_width: int = 3072
    vocab: int = 151_936


SIZES = KernelSizes()
TINY = KernelSizes(
    rows=1, prompt=3, completion=5, samples=2, heads=2, kv_heads=1, head_dim=32, width=24, mlp_width=40, vocab=200
)


class KernelDistance(NamedTuple):
    """How many arrays were compared, their distance from float32, and the most that is allowed."""

    arrays: int
    differs: float
    allowed: float


class KernelsContender:
    """Compares one kernel after the other, values and gradients."""

    def __init__(self, tiny: bool) -> None:
        self.sizes = TINY if tiny else SIZES
        self.kind = device_kind()

    def versions(self) -> dict[str, str]:
        return {"jax": jax.__version__}

    def rows(self, of: str, seconds: float) -> list[dict[str, Any]]:
        """Returns the largest relative distance of a result in bfloat16 from its float32; of layers the mean.

        Another device than a GPU of NVIDIA has none of these kernels; a CPU runs them in Pallas' interpreter.
        """
        if self.kind != "cpu" and not self.kind.startswith("NVIDIA"):
            return [{"name": of, "absent": f"these kernels are of NVIDIA GPUs, this is a {self.kind}"}]
        count, differs, allowed = COMPARED[of](self.sizes, interpret=self.kind == "cpu")
        row = {"name": of, "compared": count, "differs": differs, "allowed": allowed}
        if not differs <= allowed:
            row["problem"] = f"differs from float32 by {differs:.1e}, expected at most {allowed:.1e}"
        return [row]


def _compare(actual: Any, expected: Any) -> KernelDistance:
    distances = _distances(actual, expected)
    return KernelDistance(len(distances), max(distances), TOLERANCE)


def _distances(actual: Any, expected: Any) -> list[float]:
    pairs = zip(jax.tree.leaves(actual), jax.tree.leaves(expected), strict=True)
    return [relative_distance(np.asarray(x, np.float32), np.asarray(y, np.float32)) for x, y in pairs]


def _random(*shapes: tuple[int, ...]) -> list[Array]:
    """Draws numbers that bfloat16 has exactly."""
    keys = jax.random.split(jax.random.key(0), len(shapes))
    return [jax.random.normal(key, shape, jnp.bfloat16) for key, shape in zip(keys, shapes, strict=True)]


def _wide(tree: Any) -> Any:
    return jax.tree.map(lambda x: x.astype(jnp.float32), tree)


def _against(kernel: Form, formula: Form, arguments: Any) -> KernelDistance:
    """Compares results and gradients of a kernel in bfloat16 with those of its formula in float32."""

    def pulled(form: Form) -> Form:
        def run(arguments: Any, cotangents: Any) -> Any:
            results, pull = jax.vjp(form, *arguments)
            return results, pull(jax.tree.map(lambda x, like: x.astype(like.dtype), cotangents, results))

        return jax.jit(run)

    shapes = jax.tree.map(lambda x: x.shape, jax.eval_shape(kernel, *arguments))
    leaves, structure = jax.tree.flatten(shapes, is_leaf=lambda x: isinstance(x, tuple) and all(map(_is_size, x)))
    cotangents = jax.tree.unflatten(structure, _random(*leaves))
    return _compare(pulled(kernel)(arguments, cotangents), pulled(formula)(_wide(arguments), _wide(cotangents)))


def _is_size(x: Any) -> bool:
    return isinstance(x, int)


def _norms(sizes: KernelSizes, *, interpret: bool) -> KernelDistance:
    room = 3 * work.RANK
    statics = norms.NormStatics(1e-6, offset=False, room=room, interpret=interpret)

    def formula(x: Array, scale: Array) -> tuple[Array, Array]:
        normed = x * jax.lax.rsqrt(jnp.mean(x * x, -1, keepdims=True) + 1e-6) * scale
        return jnp.pad(normed, ((0, 0), (0, 0), (0, room))), x

    def kernel(x: Array, scale: Array) -> tuple[Array, Array]:
        return norms.fork_by_kernel(statics, x, scale.astype(jnp.float32))

    length = sizes.prompt + sizes.completion
    return _against(kernel, formula, _random((sizes.rows, length, sizes.width), (sizes.width,)))


def _rope(sizes: KernelSizes, positions: Array) -> tuple[Array, Array]:
    angles = positions[..., None] / 10_000 ** (jnp.arange(sizes.head_dim // 2) * 2 / sizes.head_dim)
    return jnp.cos(angles), jnp.sin(angles)


def _roped(sizes: KernelSizes, projected: Any, scales: Any, cos: Array, sin: Array) -> list[Array]:
    """Computes queries, keys and values [R, W, heads, H] by their formula."""
    roped = []
    for index, x in enumerate(projected):
        of_heads = x.reshape(*x.shape[:2], -1, sizes.head_dim)
        if index < 2:
            inverse = jax.lax.rsqrt(jnp.mean(of_heads * of_heads, -1, keepdims=True) + 1e-6)
            of_heads = apply_rope(of_heads * inverse * scales[index], CosSin(cos[:, :, None], sin[:, :, None]))
        roped.append(of_heads)
    return roped


def _drawn_heads(sizes: KernelSizes, rows: int, width: int) -> tuple[list[Array], tuple[Array, Array]]:
    counts = (sizes.heads, sizes.kv_heads, sizes.kv_heads)
    shapes = [(rows, width, count * sizes.head_dim) for count in counts]
    *projected, query_scale, key_scale = _random(*shapes, (sizes.head_dim,), (sizes.head_dim,))
    return projected, (query_scale, key_scale)


def _heads(sizes: KernelSizes, *, interpret: bool, grouped: bool) -> KernelDistance:
    group = (sizes.prompt, sizes.completion) if grouped else None
    width = sizes.prompt + (sizes.samples if grouped else 1) * sizes.completion
    statics = heads.HeadStatics(sizes.heads, sizes.kv_heads, sizes.head_dim, group, interpret=interpret)
    cos, sin = _rope(sizes, jnp.broadcast_to(jnp.arange(width, dtype=jnp.float32), (sizes.rows, width)))

    def kernel(projected: Any, scales: Any) -> Any:
        return heads.qkv_heads(statics, projected, scales, cos, sin)

    def formula(projected: Any, scales: Any) -> Any:
        query, key, value = _roped(sizes, projected, scales, cos, sin)
        made: Any = (query, key, value) if group is None else split_groups(query, key, value, group)
        return jax.tree.unflatten(structure, jax.tree.leaves(made))

    arguments = _drawn_heads(sizes, sizes.rows, width)
    structure = jax.tree.structure(jax.eval_shape(kernel, *arguments))
    return _against(kernel, formula, arguments)


def _decode(sizes: KernelSizes, *, interpret: bool) -> KernelDistance:
    rows = sizes.rows * sizes.samples
    statics = heads.HeadStatics(sizes.heads, sizes.kv_heads, sizes.head_dim, interpret=interpret)
    projected, scales = _drawn_heads(sizes, rows, 1)
    cos, sin = _rope(sizes, jnp.arange(rows, dtype=jnp.float32)[:, None])
    columns = 2 * sizes.head_dim
    keys, values = _random(
        (rows, sizes.kv_heads, sizes.head_dim, columns), (rows, sizes.kv_heads, columns, sizes.head_dim)
    )
    column = columns // 2 - 1
    run = functools.partial(heads.decode_heads, statics, prompts=sizes.rows)
    actual = jax.jit(run)(projected, scales, cos, sin, (keys, values), jnp.int32(column))
    query, key, value = _roped(sizes, _wide(projected), _wide(scales), cos, sin)
    by_row = query.reshape(rows, sizes.kv_heads, -1, sizes.head_dim)
    per_prompt = by_row.reshape(sizes.rows, sizes.samples, *by_row.shape[1:]).swapaxes(1, 2)
    expected = (
        by_row,
        per_prompt.reshape(sizes.rows, sizes.kv_heads, -1, sizes.head_dim),
        keys.astype(jnp.float32).at[..., column].set(key[:, 0]),
        values.astype(jnp.float32).at[:, :, column].set(value[:, 0]),
    )
    return _compare(actual, expected)


def _gated(sizes: KernelSizes, *, interpret: bool) -> KernelDistance:
    length = sizes.prompt + sizes.completion
    gate, up, cotangent = _random(*[(sizes.rows, length, sizes.mlp_width)] * 3)
    kernel = functools.partial(gated.gated_gradient, "silu", interpret=interpret)
    product, gradients = jax.jit(kernel)((gate, up), cotangent)

    def formula(gate: Array, up: Array, cotangent: Array) -> Any:
        product, pull = jax.vjp(lambda gate, up: jax.nn.silu(gate) * up, gate, up)
        return product, *pull(cotangent)

    expected = jax.jit(formula)(*_wide((gate, up, cotangent)))
    return _compare((product, *gradients), expected)


def _head(sizes: KernelSizes, *, interpret: bool) -> KernelDistance:
    tokens = sizes.rows * sizes.completion
    width = -(-sizes.width // DEPTH) * DEPTH
    hidden, head = _random((tokens, width), (sizes.vocab, width))
    ones = jnp.ones(tokens, jnp.float32)
    inputs = {"hidden": hidden, "head": head, "inverse_temperature": ones, "logit_scale": ones / width**0.5}
    inputs["target"] = jnp.arange(tokens, dtype=jnp.int32) % sizes.vocab
    options = KernelOptions(1, ("max", "total", "target", "entropy", "squares", "logits"), interpret)
    actual = jax.jit(functools.partial(by_kernel, options))(inputs)
    expected = jax.jit(functools.partial(by_compiler, options))(_wide(inputs) | {"target": inputs["target"]})
    return _compare(actual, expected)


def _layers(sizes: KernelSizes, *, interpret: bool) -> KernelDistance:
    """Compares two layers with an adapter, with all kernels and with none of them, with float32."""
    del interpret
    config = DecoderConfig(
        vocab_size=64,
        layers=2,
        width=sizes.width,
        heads=sizes.heads,
        kv_heads=sizes.kv_heads,
        head_dim=sizes.head_dim,
        mlp_width=sizes.mlp_width,
        qk_norm=True,
        lora=LoraConfig(rank=work.RANK, alpha=float(work.ALPHA), targets=work.PROJECTIONS),
    )
    mesh = make_mesh()
    model = Decoder(config)
    params = init_params(model, jax.random.key(0), mesh)
    params = jax.tree.map(lambda x: x.astype(jnp.bfloat16).astype(x.dtype), params)
    # The second half of a new adapter is 0, which has no gradient to the first.
    adapter = jax.tree.map(lambda x: x + 0.02, init_adapter(model, jax.random.key(1), mesh))
    length = sizes.prompt + sizes.completion
    rows = sizes.rows * sizes.samples
    mask = jnp.ones((rows, length), bool)
    forest = group_forest(mask, jnp.full(rows, sizes.prompt), (sizes.prompt, sizes.completion), sizes.samples)
    prompts = jax.random.randint(jax.random.key(2), (sizes.rows, sizes.prompt), 0, config.vocab_size)
    completions = jax.random.randint(jax.random.key(3), (rows, sizes.completion), 0, config.vocab_size)
    tokens = jnp.concatenate([jnp.repeat(prompts, sizes.samples, axis=0), completions], axis=1)
    weights = jax.random.normal(jax.random.key(4), (*forest.depth.shape, sizes.width))

    def results(dtype: Any, attention: Kernels) -> Any:
        of_type = Decoder(dataclasses.replace(config, dtype=dtype, attention=attention))

        def loss(adapter: Any) -> tuple[Array, Array]:
            spans = forest.spans(None)
            real = forest.readers[..., 0] >= 0
            policy = kljax.Policy(params, adapter)
            hidden, _ = bind(of_type, policy).run(forest.take(tokens), real, forest.depth, spans)
            hidden = jnp.where(real[..., None], hidden.astype(jnp.float32), 0)
            return jnp.sum(hidden * weights), hidden

        with jax.set_mesh(mesh):
            (_, hidden), gradients = jax.jit(jax.value_and_grad(loss, has_aux=True))(adapter)
        return [hidden, *jax.tree.leaves(gradients)]

    expected = results("float32", "xla")
    kernels, compiler = (_distances(results("bfloat16", attention), expected) for attention in SWITCH)
    return KernelDistance(len(kernels), float(np.mean(kernels)), OF_COMPILER * float(np.mean(compiler)))


COMPARED: dict[str, Callable[..., KernelDistance]] = {
    "norm and residual": _norms,
    "heads of rows": functools.partial(_heads, grouped=False),
    "heads of groups": functools.partial(_heads, grouped=True),
    "heads of a decode step": _decode,
    "gradient of a gated product": _gated,
    "head and its sums": _head,
    "two layers with an adapter": _layers,
}
load = KernelsContender
