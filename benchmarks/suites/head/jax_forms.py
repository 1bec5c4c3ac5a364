"""Forms of the head in JAX: kljax, the naive form, and the two of Tunix."""

import dataclasses
import functools
import pathlib
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

import kljax
from benchmarks.harness import machine
from benchmarks.suites.head.forms import CLIP, ENTROPY_COEF, KL_COEF, FormsContender, HeadOptions, Inputs, Size, loader
from kljax.typing import HeadImplementation

Array = jax.Array
# Log-probs, entropies and KL of the tokens; entropies and KL are None where the loss needs none.
Stats = tuple[Array, Array | None, Array | None]
TUNIX_CHUNK = 256


class TokenConstants(NamedTuple):
    """Non-differentiable `[N]` inputs, and the `[N, D]` hidden states of the reference."""

    targets: Array
    advantages: Array
    old_log_probs: Array
    mask: Array
    ref_hidden: Array


def logits_of(hidden: Array, head: Array) -> Array:
    """Returns float32 logits `[N, V]`."""
    return jnp.dot(hidden, head, preferred_element_type=jnp.float32)


def pick(values: Array, targets: Array) -> Array:
    """Returns the value of each token's target, `[N]`."""
    return jnp.take_along_axis(values, targets[:, None], axis=-1)[:, 0]


def naive(hidden: Array, head: Array, data: TokenConstants, *, entropy: bool = True, kl: bool = False) -> Stats:
    """Takes the log-softmax of all logits."""
    log_probs = jax.nn.log_softmax(logits_of(hidden, head))
    probs = jnp.exp(log_probs) if entropy or kl else None
    entropies = -(probs * log_probs).sum(-1) if probs is not None and entropy else None
    divergence = None
    if probs is not None and kl:
        ref_log_probs = jax.nn.log_softmax(logits_of(data.ref_hidden, jax.lax.stop_gradient(head)))
        divergence = (probs * (log_probs - ref_log_probs)).sum(-1)
    return pick(log_probs, data.targets), entropies, divergence


def tunix_full(hidden: Array, head: Array, data: TokenConstants) -> Stats:
    """Follows `compute_per_token_logps` of google/tunix: logits in the head's type, two float32 normalisations."""
    logits = jnp.dot(hidden, head).astype(jnp.float32)
    log_probs = jax.nn.log_softmax(logits)
    entropies = -(jax.nn.softmax(log_probs) * log_probs).sum(-1)
    return pick(logits, data.targets) - jax.nn.logsumexp(logits, axis=-1), entropies, None


def tunix_chunk(
    hidden: Array, head: Array, data: TokenConstants, *, rows: int | None = None, columns: int = TUNIX_CHUNK
) -> Stats:
    """Follows `compute_chunked_logps` of google/tunix: a rematerialised scan over chunks of `columns` of all rows."""
    # All tokens are one padded row, or several that divide into chunks.
    padding = -len(hidden) % columns

    def chunks(x: Array) -> Array:
        if rows is not None:
            return x.reshape(rows, -1, columns, *x.shape[1:]).swapaxes(0, 1)
        return jnp.pad(x, ((0, padding), *[(0, 0)] * (x.ndim - 1))).reshape(-1, columns, *x.shape[1:])

    def merge(x: Array) -> Array:
        return x.reshape(-1)[: len(hidden)] if rows is None else x.swapaxes(0, 1).reshape(-1)

    def chunk_stats(hidden: Array, targets: Array) -> tuple[Array, Array | None]:
        return tunix_full(hidden, head, data._replace(targets=targets))[:2]

    @jax.checkpoint
    def step(carry: None, chunk: tuple[Array, Array]) -> tuple[None, tuple[Array, Array | None]]:
        return carry, (chunk_stats if rows is None else jax.vmap(chunk_stats))(*chunk)

    _, (log_probs, entropies) = jax.lax.scan(step, None, (chunks(hidden), chunks(data.targets)))
    return merge(log_probs), merge(entropies), None


def tiled(
    hidden: Array,
    head: Array,
    data: TokenConstants,
    *,
    tile: kljax.Tile | None,
    sharding: kljax.HeadSharding | None = None,
    implementation: HeadImplementation = "tile",
    **kind: bool,
) -> Stats:
    """Calls kljax; `kind` is that of `call_options`."""
    sharded = kljax.Head(head, sharding=sharding, tile=tile, implementation=implementation)
    stats = kljax.log_probs_from_hidden(hidden, sharded, data.targets, **call_options(data, **kind))
    return stats.log_prob, stats.entropy, stats.kl


def fused(
    hidden: Array,
    head: Array,
    data: TokenConstants,
    *,
    tile: kljax.Tile | None,
    implementation: HeadImplementation = "tile",
    **kind: bool,
) -> Array:
    """Calls kljax with the loss; it is given the tokens that the mask leaves."""

    def token_loss(stats: kljax.TokenStats, inputs: tuple[Array, ...]) -> tuple[Array, None]:
        *arrays, count = inputs
        return per_token_loss((stats.log_prob, stats.entropy, stats.kl), *arrays) / count, None

    inputs = (data.old_log_probs, data.advantages, data.mask, data.mask.sum().astype(jnp.float32))
    options = call_options(data, **kind) | {"token_chunk": None if tile is None else tile.tokens}
    weights = kljax.Head(head, tile=tile, implementation=implementation)
    arguments = (hidden, weights, data.targets, token_loss, inputs)
    return kljax.token_loss_from_hidden(*arguments, **options)[0]


def call_options(
    data: TokenConstants, *, entropy: bool = True, kl: bool = False, masked: bool = False
) -> dict[str, Any]:
    """Returns the options that both calls of kljax share."""
    mask = data.mask if masked else None
    reference = (data.ref_hidden, None) if kl else None
    return {"mask": mask, "entropy": entropy, "reference": reference}


def per_token_loss(stats: Stats, old_log_probs: Array, advantages: Array, mask: Array) -> Array:
    """Returns PPO's clipped surrogate, less the entropy and plus the KL if given, of each token."""
    log_probs, entropies, divergence = stats
    per_token = kljax.ppo_clip_loss(log_probs, old_log_probs, advantages, mask, clip_low=CLIP, clip_high=CLIP)
    if entropies is not None:
        per_token = per_token - ENTROPY_COEF * entropies
    if divergence is not None:
        per_token = per_token + KL_COEF * divergence
    return per_token


def loss(stats: Stats, data: TokenConstants) -> Array:
    """Returns the mean loss of the unmasked tokens."""
    per_token = per_token_loss(stats, data.old_log_probs, data.advantages, data.mask)
    return jnp.where(data.mask, per_token, 0).sum() / data.mask.sum()


OPTIONS_OF: dict[str, dict[str, bool]] = {"plain": {"entropy": False}, "frozen": {"entropy": False}, "kl": {"kl": True}}
FROZEN = ("frozen", "lora")


def gradient_of(objective: Callable[..., Array], kind: str) -> Callable[..., tuple[Array, ...]]:
    """Returns `(hidden, head, data) -> (loss, *gradients)` of a loss; a frozen head has no gradient."""
    differentiate = jax.value_and_grad(objective, argnums=(0,) if kind in FROZEN else (0, 1))

    def run(hidden: Array, head: Array, data: TokenConstants) -> tuple[Array, ...]:
        value, gradients = differentiate(hidden, head, data)
        return (value, *gradients)

    return run


def of_kind(stats: Callable[..., Stats], kind: str) -> Callable[..., tuple[Array, ...]]:
    """Returns the function of a kind of form: loss and gradients, or mean and values if it is "forward"."""
    chosen = functools.partial(stats, **OPTIONS_OF.get(kind, {}))

    def forward(hidden: Array, head: Array, data: TokenConstants) -> tuple[Array, ...]:
        log_probs, entropies, _ = chosen(hidden, head, data)
        assert entropies is not None
        return log_probs.mean(), log_probs, entropies

    if kind == "forward":
        return forward
    return gradient_of(lambda hidden, head, data: loss(chosen(hidden, head, data), data), kind)


def build(name: str, tile: Sequence[int] | None) -> Callable[..., tuple[Array, ...]]:
    """Returns the function of a form."""
    contender, _, kind = name.removesuffix("_xla").partition("_")
    if contender == "tunix":
        return of_kind({"full": tunix_full, "chunk": tunix_chunk}[kind], "")
    options: dict[str, Any] = {"tile": None if tile is None else kljax.Tile(*tile), "masked": kind == "half"}
    if name.endswith("_xla"):
        options["implementation"] = "xla"
    if contender == "fused":
        return gradient_of(functools.partial(fused, **(options | OPTIONS_OF.get(kind, {}))), kind)
    known: dict[str, Callable[..., Stats]] = {"naive": naive, "tile": functools.partial(tiled, **options)}
    return of_kind(known[contender], kind)


class JaxForms(FormsContender):
    """The forms of JAX on a device. Each is compiled at its first use, for these arrays."""

    def __init__(self, inputs: Inputs, options: HeadOptions, releases: pathlib.Path | None = None) -> None:
        super().__init__(inputs, options, releases)
        self.device = jax.devices(options.device)[0]
        self._dtype = jnp.bfloat16 if options.dtype == "bf16" else jnp.float32
        self._put(inputs)

    def _put(self, inputs: Inputs) -> None:
        self.inputs = inputs
        self._compiled: dict[str, tuple[jax.stages.Compiled, tuple[Any, ...]]] = {}

        def put(array: np.ndarray, dtype: Any = None) -> Array:
            return jax.device_put(jnp.asarray(array, dtype, device=self.device))

        self._hidden, self._head = put(inputs.hidden, self._dtype), put(inputs.head, self._dtype)
        rest = put(inputs.targets), put(inputs.advantages), put(inputs.old_log_probs)
        self._half = TokenConstants(*rest, put(inputs.mask), put(inputs.ref_hidden, self._dtype))
        self._all = self._half._replace(mask=put(np.ones_like(inputs.mask)))

    def versions(self) -> dict[str, str]:
        return machine.versions()

    def redraw(self, tokens: int, width: int, vocab: int) -> None:
        del self._compiled, self._hidden, self._head, self._all, self._half
        with jax.default_device(self.device):
            self._put(Inputs(**draw_arrays(tokens, width, vocab, self._dtype)))

    def prepare(self, name: str) -> None:
        if name not in self._compiled:
            arguments = (self._hidden, self._head, self._half if name.endswith("_half") else self._all)
            self._compiled[name] = jax.jit(build(name, self.options.tile)).lower(*arguments).compile(), arguments

    def outputs(self, name: str) -> Sequence[Any]:
        self.prepare(name)
        compiled, arguments = self._compiled[name]
        return jax.block_until_ready(compiled(*arguments))

    def temporary(self, name: str) -> int | None:
        self.prepare(name)
        plan = self._compiled[name][0].memory_analysis()
        return None if plan is None else int(plan.temp_size_in_bytes)


def make_inputs(size: Size) -> Inputs:
    """Draws a problem, for the processes of all frameworks."""
    return Inputs(**jax.device_get(draw_arrays(*dataclasses.astuple(size), jnp.float32)))


@functools.partial(jax.jit, static_argnums=(0, 1, 2, 3))
def draw_arrays(tokens: int, width: int, vocab: int, dtype: Any) -> dict[str, Any]:
    """Draws the fields of `Inputs` on the device."""
    keys = jax.random.split(jax.random.key(0), 6)
    third = jnp.arange(tokens) % 3 == 0
    hidden = jax.random.normal(keys[0], (tokens, width), dtype)
    head = jax.random.normal(keys[1], (width, vocab), dtype) * jnp.asarray(2 * width**-0.5, dtype)
    targets = jax.random.randint(keys[2], (tokens,), 0, vocab)
    log_probs = kljax.log_probs_from_hidden(hidden, kljax.Head(head), targets).log_prob
    shift = jax.random.uniform(keys[3], (tokens,), minval=-0.1, maxval=0.1)
    return {
        "hidden": hidden,
        "head": head,
        "targets": targets,
        "advantages": jax.random.normal(keys[4], (tokens,)),
        "old_log_probs": log_probs - jnp.where(third, 0.4 * jnp.sign(shift), shift),
        "mask": jnp.arange(tokens) % 2 == 0,
        "ref_hidden": hidden + jax.random.normal(keys[5], hidden.shape, dtype) * jnp.asarray(0.1, dtype),
    }


load = loader(JaxForms)
