"""Runs the update of a preset on the recorded batch and measures how far it is from what the system computed."""

import dataclasses
import functools
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import jaxpr_as_fun

import kljax
from tests import tiny
from tests.goldens.presets import batch as recordings
from train.config.load import parse
from train.config.plan import Layout, Plan
from train.config.schema import Config
from train.models import Decoder
from train.models.rope import frequencies
from train.models.sharding import make_mesh
from train.rl import objective as objectives
from train.rl.algorithms import make_controllers
from train.rl.policy import ScoredPolicy, Sequences, token_stats
from train.rl.preparation import make_preparation
from train.rl.state import initial_state
from train.rl.step import make_prepare, make_update
from train.rl.terms import make_weighting
from train.sequences.batch import Batch
from train.weights.huggingface import load_params
from train.weights.huggingface.config import decoder_config
from train.weights.huggingface.names import PREFIXES, full_name, leaf_mappings

Tree = Any
# The loss and the weight gradients of an update, by the names of transformers.
Update = tuple[float, dict[str, np.ndarray]]
# Half the time to compile, for a program that runs once.
QUICK = {"xla_backend_optimization_level": 0, "xla_llvm_disable_expensive_passes": True}


@dataclasses.dataclass(frozen=True)
class Proof:
    """How far kljax's update is from that of a system.

    Attributes:
      dtype: the type that the system computed in.
      loss: difference of the losses, relative to theirs.
      gradient: norm of the difference of the weight gradients, relative to theirs.
      accumulation: the same distance between the system's own gradients with two micro-batches and with one.
    """

    dtype: str
    loss: float
    gradient: float
    accumulation: float


@functools.cache
def recording(system: str) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
    """Loads the index and the arrays of a system."""
    index = json.loads((recordings.DIRECTORY / f"{system}.json").read_text())
    with np.load(recordings.DIRECTORY / f"{system}.npz") as arrays:
        return index, dict(arrays)


def recorded_presets() -> list[str]:
    """Lists the presets that have a recording."""
    systems = sorted(path.stem for path in recordings.DIRECTORY.glob("*.json"))
    return [f"{system}/{name}" for system in systems for name in recording(system)[0]["algorithms"]]


def config_of(name: str, micro_batches: int = 1) -> Config:
    """The config of a preset on the recorded batch."""
    raw: dict[str, Any] = {
        "preset": name,
        "steps": 1,
        "temperature": recordings.TEMPERATURE,
        "data": {
            "max_prompt_length": recordings.PROMPT_LENGTH,
            "max_completion_length": recordings.COMPLETION_LENGTH,
        },
        "model": {"path": str(recordings.MODEL)},
        "rollout": {"prompts_per_step": recordings.PROMPTS, "samples_per_prompt": recordings.SAMPLES},
        "optim": {"micro_batches": micro_batches},
    }
    for path, value in CHANGES.get(name, {}).items():
        *sections, last = path.split(".")
        section = raw
        for part in sections:
            section = section.setdefault(part, {})
        section[last] = value
    return parse(raw)[0]


def full_batch(name: str = "") -> Batch:
    """The recorded batch in float64, with the rewards as the system of a preset has them."""
    recorded = recordings.load()

    def per_token(values: np.ndarray) -> jax.Array:
        return jnp.asarray(np.pad(values, ((0, 0), (recordings.PROMPT_LENGTH, 0))))

    drawn = Batch(
        tokens=jnp.asarray(recorded.tokens, jnp.int32),
        token_mask=jnp.asarray(recorded.token_mask),
        completion_mask=per_token(recorded.mask),
        rewards=jnp.asarray(REWARDS.get(name, np.positive)(recorded.rewards)),
        group_ids=jnp.asarray(recorded.groups, jnp.int32),
        rollout_log_probs=per_token(recorded.rollout_log_probs),
        old_log_probs=per_token(recorded.old_log_probs),
        ref_log_probs=per_token(recorded.ref_log_probs),
        values=per_token(recorded.old_values),
    )
    return tiny.from_column_0(drawn, recordings.PROMPT_LENGTH)


@functools.cache
def loaded() -> tuple[Decoder, Tree]:
    """The model of the recordings and its weights in float64."""
    model = Decoder(decoder_config(recordings.MODEL))
    params = load_params(recordings.MODEL, model, make_mesh())
    return model, jax.tree.map(lambda x: x.astype(jnp.float64), params)


@functools.cache
def scored(temperature: float) -> tuple[jax.Array, Callable[[jax.Array], Tree]]:
    """The log-probs [B, P + T] of the model, and the function from their cotangent to that of the weights."""
    (model, params), batch = loaded(), full_batch()

    def log_probs(params: Tree) -> jax.Array:
        scored, sequences = ScoredPolicy(model, kljax.Policy(params)), Sequences.of(batch, Layout())
        stats, _ = token_stats(scored, sequences, temperature=temperature)
        return stats.log_prob

    def value_and_pull(params: Tree, cotangent: jax.Array) -> tuple[jax.Array, Tree]:
        value, pull = jax.vjp(log_probs, params)
        return value, pull(cotangent)[0]

    zeros = jnp.zeros(batch.tokens.shape)
    # transformers keeps the frequencies of the rotary embedding in float32, whatever the type of the model.
    rounded = mock.patch("train.models.rope.frequencies", lambda *of: np.float64(np.float32(frequencies(*of))))
    with rounded:
        compiled = jax.jit(value_and_pull).lower(params, zeros).compile(compiler_options=QUICK)
    return compiled(params, zeros)[0], lambda cotangent: compiled(params, cotangent)[1]


def prepared_batch(config: Config, batch: Batch) -> Batch:
    """The batch with advantages and token weights."""
    states = {name: controller.init() for name, controller in make_controllers(Plan.of(config)).items()}
    prepared = make_preparation(Plan.of(config))(batch, states)[0]
    return make_weighting(Plan.of(config))(prepared)


def update(configs: Sequence[Config]) -> Iterator[Update]:
    """Yields one update of each config, which differ in their number of micro-batches alone.

    The decoder is run and differentiated once for all presets: the objective sees its log-probs as the parameters, and
    the gradient with respect to them goes on through the decoder.
    """
    model, _ = loaded()
    log_probs, pull = scored(configs[0].temperature)

    def stats_of(scored: ScoredPolicy, sequences: Sequences, **_: object) -> tuple[kljax.TokenStats, jax.Array]:
        stats = kljax.TokenStats(scored.policy.params, jnp.zeros_like(scored.policy.params))
        return stats, jnp.zeros((*sequences.forest.depth.shape, model.config.width))

    def loss_of_stats(
        *of: Any, token_loss: Callable[..., tuple[jax.Array, Tree]], per_token: Tree, **_: object
    ) -> tuple[jax.Array, Tree, jax.Array]:
        stats, hidden = stats_of(*of)
        loss, terms = token_loss(stats, per_token)
        return loss.sum(), terms, hidden

    head = {"kernel": jnp.zeros(model.config.width), "bias": jnp.zeros(())}

    def summed(config: Config, log_probs: jax.Array, batch: Batch) -> tuple[jax.Array, jax.Array]:
        objective = objectives.make_objective(Plan.of(config), model)

        def loss_of(log_probs: jax.Array, batch: Batch) -> jax.Array:
            return objective({"params": log_probs, "value_head": head}, None, batch, objectives.coefficients(config))[0]

        parts = jax.tree.map(lambda x: x.reshape(config.optim.micro_batches, -1, *x.shape[1:]), (log_probs, batch))
        losses, gradients = jax.vmap(jax.value_and_grad(loss_of))(*parts)
        return losses.sum(), gradients.reshape(log_probs.shape)

    def whole(log_probs: jax.Array, batch: Batch) -> list[tuple[jax.Array, jax.Array]]:
        prepared = prepared_batch(configs[0], batch)
        return [summed(config, log_probs, prepared) for config in configs]

    with mock.patch.multiple(objectives, token_stats=stats_of, fused_loss=loss_of_stats):
        arguments = log_probs, full_batch(configs[0].preset or "")
        traced = jax.make_jaxpr(whole)(*arguments)
    # Operation by operation: presets have most of them in common, and no program is compiled for one preset.
    actual = jaxpr_as_fun(traced)(*jax.tree.leaves(arguments))
    results = zip(actual[::2], actual[1::2], strict=True)
    return ((float(loss), dict(_named(model, jax.device_get(pull(cotangent))))) for loss, cotangent in results)


def compiled_update(configs: Sequence[Config]) -> Iterator[Update]:
    """The same from the trainer's own compiled functions, decoder included, with its micro-batches."""
    (model, params), mesh = loaded(), make_mesh()
    replicated = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec())
    for config in configs:
        copied = tiny.copied(params)
        state = initial_state({"params": copied}, tiny.keep_gradient(), make_controllers(Plan.of(config)), replicated)
        prepared, _, _ = make_prepare(Plan.of(config), mesh)(full_batch(config.preset or ""), state.controllers)
        step = make_update(Plan.of(config), model, tiny.keep_gradient(), state, mesh)
        after, metrics = step(state, None, prepared, jnp.arange(recordings.ROWS), objectives.coefficients(config))
        yield float(metrics["loss"].value()), dict(_named(model, jax.device_get(after.opt_state["params"])))


def _named(model: Decoder, gradients: Tree) -> Iterator[tuple[str, np.ndarray]]:
    for mapping in leaf_mappings(model):
        leaf = gradients
        for key in mapping.path:
            leaf = leaf[key]
        for name, array in zip(mapping.names, leaf if mapping.stacked else (leaf,), strict=True):
            yield full_name(name, PREFIXES[0]), array.T if mapping.transposed else array


def prove(
    name: str, run: Callable[[Sequence[Config]], Iterator[Update]] = update, micro_batches: Sequence[int] = (1,)
) -> list[Proof]:
    """Runs a preset with each number of micro-batches, and compares it with its recording of one."""
    system, _, algorithm = name.partition("/")
    index, arrays = recording(system)
    entry = index["algorithms"][algorithm]["accumulation"]
    others = {key.split("/", 2)[2]: array for key, array in arrays.items() if key.startswith(f"{algorithm}/1/")}
    expected = entry["1"]["loss"] - (empty_row_of_rloo() if name == "trl/rloo" else 0.0)

    def compared(loss: float, gradients: Mapping[str, np.ndarray]) -> Proof:
        assert others.keys() == gradients.keys()
        return Proof(
            dtype=index["dtype"],
            loss=abs(loss - expected) / abs(expected),
            gradient=_distance(gradients, others),
            accumulation=entry["2"]["distance"],
        )

    with jax.enable_x64(True):
        return [compared(*actual) for actual in run([config_of(name, count) for count in micro_batches])]


def empty_row_of_rloo() -> float:
    """The loss that TRL's RLOO has for the row without a token, `-A / B`: its ratio is 1, whatever the policy."""
    recorded, row = recordings.load(), recordings.EMPTY_ROW
    log_ratios = np.where(recorded.mask, recorded.old_log_probs - recorded.ref_log_probs, 0.0)
    rewards = recorded.rewards - 0.05 * log_ratios.sum(1)
    others = (recorded.groups == recorded.groups[row]) & (np.arange(recordings.ROWS) != row)
    return -float(rewards[row] - rewards[others].mean()) / recordings.ROWS


def _distance(ours: Mapping[str, np.ndarray], theirs: Mapping[str, np.ndarray]) -> float:
    difference = sum(np.sum((ours[name] - theirs[name]) ** 2) for name in theirs)
    return float(np.sqrt(difference / sum(np.sum(array**2) for array in theirs.values())))


CHANGES: dict[str, Mapping[str, Any]] = {
    # The recordings of TRL have the KL on, which is off by default there.
    "trl/grpo": {"kl.loss.coef": 0.04},
    "trl/dr_grpo": {"kl.loss.coef": 0.04},
    "trl/gspo": {"kl.loss.coef": 0.04},
    # The critics of the systems are models of their own.
    **{f"{system}/ppo": {"loss.value_coef": 1e-12} for system in ("openrlhf", "skyrl", "slime", "verl")},
    # A cap that is active on the recorded batch.
    **{
        f"{system}/grpo_tis": {
            "correction": [{"type": "truncated_importance_weights", "level": "token", "max_weight": 1.1}]
        }
        for system in ("skyrl", "slime", "verl")
    },
    # ART knows no temperature.
    **{f"art/{name}": {"temperature": 1.0} for name in ("cispo", "grpo", "gspo")},
    # The defaults of prime-rl drop no token of the recorded batch.
    "prime-rl/grpo": {"loss.clip_low": 0.02, "loss.clip_high": 0.03},
    "prime-rl/max_rl": {"loss.clip_low": 0.02, "loss.clip_high": 0.03},
    "prime-rl/ipo": {"loss.clip_low": 0.03, "loss.clip_high": 0.03},
    # Recorded without the empty row, which slime refuses here.
    "slime/reinforce++": {"loss.empty_rows": "drop"},
    # Tunix's PPO scores at temperature 1, whatever the sampler's.
    "tunix/ppo": {"loss.value_coef": 1e-12, "temperature": 1.0},
}
"""What a recording has besides its preset, beyond lengths and temperature."""
REWARDS: dict[str, Callable[[np.ndarray], np.ndarray]] = {"tunix/ppo": np.trunc}
"""What a system does to the rewards before its advantages: Tunix's PPO has them as integers."""
