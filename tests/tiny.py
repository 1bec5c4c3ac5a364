"""The smallest run that has every part: a config, a model of three layers, and a batch as a rollout would leave it."""

import copy
import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import Mesh

import kljax
from train.config.load import apply_overrides, parse
from train.config.plan import Plan
from train.config.schema import Config
from train.context import RunContext, make_bare_context
from train.data.prompts import Prompts
from train.data.tasks import Example, load_task
from train.data.tokenizers import ByteTokenizer
from train.distributed.global_arrays import RowSplit
from train.models import Decoder
from train.models.sharding import batch_sharding, make_mesh
from train.rl.state import TrainState
from train.rollouts.collect import Rollout, arrive, judge_rows, shard_completions
from train.rollouts.jax_source import JaxSource
from train.rollouts.source import Completions, Request
from train.rollouts.stream import Stream
from train.run.setup import first_state
from train.sequences.batch import Batch
from train.weights.model import make_model

PROMPT, NEW_TOKENS = 5, 4
SAMPLES = 2
LAYERS = 3
RAW = {
    "steps": 3,
    "task": "arithmetic",
    "data": {"max_prompt_length": PROMPT, "max_completion_length": NEW_TOKENS, "max_operand": 9},
    "model": {"layers": LAYERS, "width": 16, "heads": 2, "kv_heads": 1, "head_dim": 8, "mlp_width": 24},
    "warm_start": {"steps": 2, "batch_size": 4, "learning_rate": 1e-3},
    "rollout": {"prompts_per_step": 4, "samples_per_prompt": SAMPLES},
    "eval": {"prompts": 5, "batch_size": 4},
    "checkpoint": {"every": 1, "keep": 2},
}
ROWS, LENGTH = 8, PROMPT + NEW_TOKENS
PROMPT_LENGTHS = (5, 5, 3, 3, 1, 1, 4, 4)
COMPLETION_LENGTHS = (4, 1, 2, 4, 0, 3, 2, 4)


def config_of(*overrides: str) -> Config:
    """The tiny config with `a.b=c` on top."""
    raw = copy.deepcopy(RAW)
    problems = apply_overrides(raw, overrides)
    assert not problems, problems
    return parse(raw)[0]


@functools.cache
def mesh_of(data: int = 1, fsdp: int = 1, tensor: int = 1) -> Mesh:
    """A mesh of the first devices."""
    return make_mesh(data, fsdp, tensor)


def model_of(config: Config) -> Decoder:
    """The model of a config."""
    return make_model(config, ByteTokenizer())


@functools.cache
def host_params() -> dict:
    """Weights on the host, the same for every config here, and far enough from 0 to have opinions."""
    params = drawn(model_of(config_of()), jax.random.key(0))
    return jax.tree.map(lambda x: np.asarray(x) * (2 if x.ndim > 2 else 1), params)


def drawn(model: Decoder, key: jax.Array, *, adapter: bool = False) -> dict:
    """Draws weights, or an adapter, on one device, whatever mesh is set where they are first asked for."""
    from train.models.parameters import init_adapter, init_params

    # A key remembers the mesh under which it was made; its numbers do not.
    numbers = np.asarray(jax.random.key_data(key))
    with jax.set_mesh(mesh_of()):
        return (init_adapter if adapter else init_params)(model, jax.random.wrap_key_data(numbers), mesh_of())


def filled(shapes: Any, seed: int) -> Any:
    """Weights of some shapes, all of them with opinions, and norms near 1; drawn in NumPy, which compiles nothing."""
    rng = np.random.default_rng(seed)

    def leaf(path: tuple, x: Any) -> jax.Array:
        fan_in = x.shape[-2] if x.ndim > 1 else 10
        return jnp.asarray((path[-1].key == "scale") + rng.normal(size=x.shape) * fan_in**-0.5, x.dtype)

    return jax.tree_util.tree_map_with_path(leaf, shapes)


def placed(policy: kljax.Policy, model: Decoder, mesh: Mesh) -> kljax.Policy:
    """Weights on the devices of a mesh, as the model shards them; to draw them there would compile a program."""
    from train.models.parameters import abstract_adapter, abstract_params

    adapter = None if policy.adapter is None else abstract_adapter(model, mesh)
    shapes = kljax.Policy(abstract_params(model, mesh), adapter)
    return jax.device_put(policy, jax.tree.map(lambda x: x.sharding, shapes))


def moved(params: dict, by: float, seed: int = 1) -> dict:
    """Weights some way off, as those of a reference or of a policy after some updates."""
    rng = np.random.default_rng(seed)
    return jax.tree.map(lambda x: x + np.float32(by) * rng.normal(size=x.shape).astype(np.float32), params)


def copied(tree: Any) -> Any:
    """The same arrays in buffers of their own, which may be donated; `jnp.copy` would compile for each shape."""
    return jax.device_put(tree, jax.tree.map(lambda x: x.sharding, tree), may_alias=False)


def wide(tree: Any) -> Any:
    """The same arrays, on the same devices, in float64 where they are floats."""

    def widened(x: Any) -> Any:
        floating = jnp.issubdtype(x.dtype, jnp.floating)
        return jax.device_put(np.asarray(x, np.float64), getattr(x, "sharding", None)) if floating else x

    return jax.tree.map(widened, tree)


def keep_gradient() -> optax.GradientTransformation:
    """An optimizer that changes nothing and whose state is the last gradient."""
    return optax.GradientTransformation(
        lambda params: jax.tree.map(jnp.zeros_like, params),
        lambda gradient, state, params: (jax.tree.map(jnp.zeros_like, gradient), gradient),
    )


def state_of(config: Config, optimizer: optax.GradientTransformation, mesh: Mesh | None = None) -> TrainState:
    """A first state of its own buffers, so that it may be donated."""
    model, mesh = model_of(config), mesh or mesh_of()
    base = copied(placed(kljax.Policy(host_params()), model, mesh).params)
    return first_state(Plan.of(config), model, mesh, base, optimizer)


def rollout_batch(seed: int = 0) -> Batch:
    """Returns a rollout: rows of all lengths, one of them without a single token."""
    rng = np.random.default_rng(seed)
    column = np.arange(LENGTH)
    prompts, completions = (np.array(lengths)[:, None] for lengths in (PROMPT_LENGTHS, COMPLETION_LENGTHS))
    completion_mask = (column >= PROMPT) & (column < PROMPT + completions)
    tokens = rng.integers(0, 256, (ROWS, LENGTH))
    tokens[:, :PROMPT] = tokens[::SAMPLES, :PROMPT].repeat(SAMPLES, axis=0)
    drawn = Batch(
        tokens=jnp.asarray(tokens, jnp.int32),
        token_mask=jnp.asarray(((column >= PROMPT - prompts) & (column < PROMPT)) | completion_mask),
        completion_mask=jnp.asarray(completion_mask),
        rewards=jnp.asarray(rng.integers(0, 2, ROWS) + rng.normal(size=ROWS) / 4, jnp.float32),
        group_ids=jnp.asarray(np.repeat(np.arange(ROWS // SAMPLES), SAMPLES), jnp.int32),
        rollout_log_probs=jnp.asarray(np.where(completion_mask, -5 + rng.normal(size=completion_mask.shape), 0), "f4"),
    )
    return from_column_0(drawn)


def from_column_0(drawn: Batch, prompt: int = PROMPT) -> Batch:
    """Moves rows that were drawn with their completions from column `prompt` on, and keeps what is beside them."""
    mask = np.asarray(drawn.token_mask)
    columns = (np.arange(mask.shape[1]) + mask.argmax(-1)[:, None]) % mask.shape[1]

    def move(x: jax.Array) -> jax.Array:
        if x.ndim < 2:
            return x
        return jnp.asarray(np.take_along_axis(np.asarray(x), columns.reshape(*mask.shape, *[1] * (x.ndim - 2)), axis=1))

    lengths = jnp.asarray(mask[:, :prompt].sum(-1), jnp.int32)
    return dataclasses.replace(jax.tree.map(move, drawn), prompt_lengths=lengths)


def full_batch(log_probs: np.ndarray, seed: int = 0) -> Batch:
    """A batch with every field, its log-probs scattered around `log_probs`, so that no term is 0 and clips are active.

    Under the mask the fields hold 1e4, which would show if it got out.
    """
    rng, batch = np.random.default_rng(seed + 1), rollout_batch(seed)
    mask = np.asarray(batch.completion_mask)

    def field(center: np.ndarray | float, spread: float) -> jax.Array:
        return jnp.asarray(np.where(mask, center + spread * rng.normal(size=mask.shape), 1e4), jnp.float32)

    return dataclasses.replace(
        batch,
        rollout_log_probs=field(log_probs, 0.1),
        old_log_probs=field(log_probs, 0.3),
        ref_log_probs=field(log_probs, 0.5),
        values=field(0.0, 1.0),
        advantages=field(0.0, 1.0),
        returns=field(0.0, 1.0),
        token_weights=kljax.token_weights(mask, mode="token_mean"),
    )


def rollout_of(context: RunContext, completions: Completions, step: int = 0) -> Rollout:
    """Shards the rows of completions over the devices, and judges them, after so many steps."""
    rows = RowSplit.of(batch_sharding(context.mesh), len(completions.examples))
    return judge_rows(context, arrive(shard_completions(context, completions, rows, step)), rows, step)


def stream_of(context: RunContext, source: Any = None) -> Stream:
    """The stream of a source, or of the sampler of this process."""
    return Stream(context, source or JaxSource(context))


def sampled(context: RunContext, source: Any, request: Request) -> Completions:
    """The completions of one request, in whatever parts the source gives them."""
    stream = Stream(context, source)
    stream.start([request])
    return stream.take(request)


@dataclasses.dataclass(frozen=True)
class SamePrompts:
    """The same prompts at every step."""

    examples: Sequence[Example]

    def batch(self, step: int) -> Sequence[Example]:
        return self.examples


def context_of(config: Config, **changes: Any) -> RunContext:
    """The context of a config on one device, without a reference; `changes` replace fields of it."""
    task, tokenizer = changes.get("task") or load_task(config), ByteTokenizer()
    model, mesh = changes.pop("model", None) or model_of(config), changes.pop("mesh", None) or mesh_of()
    prompts = Prompts(
        task.train, tokenizer, length=PROMPT, batch_size=config.rollout.prompts_per_step, seed=config.seed
    )
    context = make_bare_context(config, model, mesh, tokenizer)
    return dataclasses.replace(context, **{"task": task, "prompts": prompts, **changes})
