"""The decoder against transformers: logits, log-probs, gradients and continuations of a tiny model of every family.

The models and the numbers are those of `tests/goldens/models`, in float32.
"""

import functools
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import kljax
from train.models import Decoder, DecoderState
from train.models.head import head
from train.models.sharding import make_mesh
from train.rl.policy import ScoredPolicy, Sequences, hidden_states, token_stats
from train.sequences.batch import move_columns
from train.weights.huggingface import load_params
from train.weights.huggingface.config import decoder_config
from train.weights.huggingface.fused import is_gpt_oss
from train.weights.huggingface.names import GPT_OSS, HEAD, family_name, leaf_mappings
from train.weights.peft import load_adapter, read_peft_config

pytestmark = pytest.mark.one_jax
GOLDENS = Path(__file__).parents[2] / "goldens" / "models"
MIXTURES = ("qwen3_moe", "qwen2_moe", "mixtral", "olmoe", "gpt_oss")
FAMILIES = ("qwen2", "qwen3", "llama3", "mistral", "gemma3", "gemma2", "qwen3_yarn", *MIXTURES)
ADAPTED = ("qwen3", "gemma3")
TOLERANCE = 5e-6
# Half the time to compile, for a program that runs once and whose result is no float.
QUICK = {"xla_backend_optimization_level": 0, "xla_llvm_disable_expensive_passes": True}


@functools.cache
def golden(family: str) -> dict[str, np.ndarray]:
    """Returns the results of transformers."""
    with np.load(GOLDENS / family / "expected.npz") as file:
        return dict(file)


@functools.cache
def loaded(family: str, adapted: bool = False) -> tuple[Decoder, kljax.Policy]:
    """The family's folder, and its PEFT adapter if asked for."""
    folder, mesh = GOLDENS / family, make_mesh()
    lora = read_peft_config(folder / "adapter") if adapted else None
    model = Decoder(decoder_config(folder, lora=lora))
    params = loaded(family)[1].params if adapted else load_params(folder, model, mesh)
    return model, kljax.Policy(params, load_adapter(folder / "adapter", model, mesh) if adapted else None)


def logits_of(model: Decoder, params: dict, hidden: jax.Array) -> jax.Array:
    logits = hidden @ head(model, params)
    cap = model.config.final_softcap
    return logits if cap is None else cap * jnp.tanh(logits / cap)


@functools.cache
def results(family: str, adapted: bool = False) -> tuple[np.ndarray, np.ndarray, np.ndarray, dict]:
    """Loss, log-probs, logits and the gradient of the loss, in one program."""
    model, policy = loaded(family, adapted)
    padded = golden(family)["mask"]
    begins = padded.argmax(1)
    tokens, mask = (jnp.asarray(from_left(x, begins)) for x in (golden(family)["tokens"], padded))
    scored = mask & jnp.roll(mask, 1, axis=1).at[:, 0].set(False)

    def loss(policy: kljax.Policy) -> tuple[jax.Array, tuple[jax.Array, jax.Array]]:
        sequences = Sequences.rows(tokens, mask, scored)
        stats, hidden = token_stats(ScoredPolicy(model, policy), sequences, temperature=1.0)
        logits = jnp.where(mask[..., None], logits_of(model, policy.params, sequences.forest.gather(hidden)), 0)
        return -kljax.aggregate(stats.log_prob, scored, mode="token_mean"), (stats.log_prob, logits)

    (value, (log_probs, logits)), gradient = jax.jit(jax.value_and_grad(loss, has_aux=True))(policy)
    grads = gradient.adapter if adapted else gradient.params
    value, log_probs, logits, grads = jax.device_get((value, log_probs, logits, grads))
    return value, from_left(log_probs, -begins), from_left(logits, -begins), grads


def from_left(x: np.ndarray, begins: np.ndarray) -> np.ndarray:
    """Rows of transformers, which are padded on the left, from column 0 on."""
    return move_columns(x, begins, x.shape[1])


def tensors(model: Decoder, tree: dict) -> dict[str, np.ndarray]:
    """The tensors of a tree of the parameters' structure by the names of transformers, which fuses experts."""
    arrays: dict[str, np.ndarray] = {}
    for mapping in leaf_mappings(model):
        leaf = functools.reduce(lambda node, key: node[key], mapping.path, tree)
        for name, index in zip(mapping.names, mapping.indices(), strict=True):
            full = name if name == HEAD else f"model.{name}"
            arrays[full] = leaf[index].T if mapping.transposed else leaf[index]
    for number in model.config.expert_layers:
        arrays |= fused_experts(model, arrays, f"model.layers.{number}.mlp.experts")
    return {family_name(name, GPT_OSS): x for name, x in arrays.items()} if is_gpt_oss(model.config) else arrays


def fused_experts(model: Decoder, arrays: dict[str, np.ndarray], base: str) -> dict[str, np.ndarray]:
    """The tensors of a layer in which transformers has all its experts; GPT-OSS's are transposed, with biases."""

    def stacked(name: str) -> np.ndarray:
        return np.stack([arrays[f"{base}.{expert}.{name}"] for expert in range(model.config.experts.count)])

    gate, up, down = (stacked(f"{name}_proj.weight") for name in ("gate", "up", "down"))
    if not is_gpt_oss(model.config):
        return {f"{base}.gate_up_proj": np.concatenate([gate, up], 1), f"{base}.down_proj": down}
    pairs = (gate.swapaxes(1, 2), up.swapaxes(1, 2)), (stacked("gate_proj.bias"), stacked("up_proj.bias"))
    weights, biases = (np.stack(pair, -1).reshape(*pair[0].shape[:-1], -1) for pair in pairs)
    fused = {f"{base}.gate_up_proj": weights, f"{base}.down_proj": down.swapaxes(1, 2)}
    return fused | {f"{base}.gate_up_proj_bias": biases, f"{base}.down_proj_bias": stacked("down_proj.bias")}


def adapter_tensor(tree: dict, name: str) -> np.ndarray:
    """The tensor of a name as PEFT gives it."""
    *path, _ = name.removeprefix("base_model.model.model.").replace(".default", "").split(".")
    layer = int(path.pop(1))
    return functools.reduce(lambda node, key: node[key], path, tree)[layer].T


def assert_close(got: np.ndarray, want: np.ndarray, what: str) -> None:
    worst = float(np.abs(np.asarray(got, np.float64) - want).max())
    assert worst < TOLERANCE, f"{what}: {worst:.1e}"


@pytest.mark.parametrize("family", FAMILIES)
def test_left_padded_logits_and_log_probs_match_transformers(family):
    _, log_probs, logits, _ = results(family)
    assert_close(logits, golden(family)["logits"], "logits")
    assert_close(log_probs, golden(family)["log_probs"], "log-probs")


@pytest.mark.parametrize("family", FAMILIES)
def test_loss_gradients_match_transformers(family):
    value, _, _, grads = results(family)
    arrays = tensors(loaded(family)[0], grads)
    assert_close(value, golden(family)["loss"], "loss")
    recorded = {name[5:]: array for name, array in golden(family).items() if name.startswith("grad/")}
    assert len(recorded) >= 8
    for name, want in recorded.items():
        assert np.abs(want).max() > 1e-4
        assert_close(arrays[name], want, name)
    if family in MIXTURES:
        router = "router.weight" if family == "gpt_oss" else "gate.weight"
        assert {name.rpartition(".mlp.")[2] for name in recorded} > {router, "experts.gate_up_proj"}


@pytest.mark.parametrize("family", ADAPTED)
def test_adapter_values_and_gradients_match_peft(family):
    want = {name.removeprefix("adapter/"): array for name, array in golden(family).items() if "adapter/" in name}
    value, log_probs, logits, grads = results(family, adapted=True)
    assert_close(logits, want["logits"], "logits")
    assert_close(log_probs, want["log_probs"], "log-probs")
    assert_close(value, want["loss"], "loss")
    recorded = [name for name in want if name.startswith("grad/")]
    assert len(recorded) == 2
    for name in recorded:
        assert_close(adapter_tensor(grads, name[5:]), want[name], name)
    assert np.abs(golden(family)["logits"] - want["logits"]).max() > 0.1


def greedy(family: str) -> np.ndarray:
    """The continuations of the recorded prompts by the most probable token, through the cache of `decode`."""
    model, policy = loaded(family)
    prompts, mask = jnp.asarray(golden(family)["prompts"]), jnp.asarray(golden(family)["prompt_mask"])
    max_new_tokens = golden(family)["greedy"].shape[1]

    @functools.partial(jax.jit, compiler_options=QUICK)
    def generate(params: dict) -> jax.Array:
        hidden, cache, _ = model.bind(params).prefill(prompts, mask)
        cache = DecoderState.of(cache, 1, max_new_tokens)
        seen = jnp.pad(mask, ((0, 0), (0, max_new_tokens)))
        first = jnp.argmax(logits_of(model, params, hidden[:, -1]), -1)

        def step(carry: tuple, column: jax.Array) -> tuple:
            token, cache, seen = carry
            seen = seen.at[:, column].set(True)
            position = seen.sum(-1) - 1
            hidden, cache, _ = model.bind(params).decode(token, position, cache, seen, column)
            return (jnp.argmax(logits_of(model, params, hidden), -1), cache, seen), token

        columns = prompts.shape[1] + jnp.arange(max_new_tokens)
        return jax.lax.scan(step, (first, cache, seen), columns)[1].T

    return np.asarray(generate(policy.params))


# Their cache and its layers are those of other families; ropes and routers differ, which the logits show.
ALIKE = ("llama3", "qwen3_yarn", "qwen2_moe", "mixtral")


@pytest.mark.parametrize(
    "family", [pytest.param(family, marks=[pytest.mark.thorough] * (family in ALIKE)) for family in FAMILIES]
)
def test_greedy_continuations_match_transformers(family):
    np.testing.assert_array_equal(greedy(family), golden(family)["greedy"])


def test_a_mesh_changes_no_number():
    model, mesh = loaded("gemma3")[0], make_mesh(fsdp=2, tensor=2)
    spread = load_params(GOLDENS / "gemma3", model, mesh)
    tokens, padded = golden("gemma3")["tokens"][:2], golden("gemma3")["mask"][:2]
    begins = padded.argmax(1)
    tokens, mask = from_left(tokens, begins), from_left(padded, begins)
    with jax.set_mesh(mesh):
        hidden = jax.jit(hidden_states)(ScoredPolicy(model, kljax.Policy(spread)), Sequences.rows(tokens, mask))
        logits = jax.jit(logits_of, static_argnums=0)(model, spread, hidden)
    logits = from_left(np.where(mask[..., None], logits, 0), -begins)
    assert_close(logits, golden("gemma3")["logits"][:2], "logits")
