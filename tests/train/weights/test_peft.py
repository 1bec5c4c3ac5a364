"""PEFT folders: what PEFT wrote computes what it computed there; what is written is what was read; errors name both."""

import dataclasses
import json
import shutil
from pathlib import Path

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from train.config.adapter import with_adapter
from train.models import Decoder, DecoderConfig, LoraConfig
from train.models.config import PROJECTIONS, ROUTER, ExpertsConfig, LayerKind
from train.models.parameters import init_adapter
from train.models.sharding import make_mesh
from train.weights.peft import check_adapter, is_peft, load_adapter, read_peft_config, save_adapter
from train.weights.peft_config import read_config, targeted

GOLDENS = Path(__file__).parents[2] / "goldens" / "models"
ADAPTER = GOLDENS / "qwen3" / "adapter"
CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
LORA = LoraConfig(4, 8.0, ("q_proj", "v_proj", "down_proj"))
MODEL = Decoder(
    DecoderConfig(
        vocab_size=320, layers=3, width=32, heads=4, kv_heads=2, head_dim=16, mlp_width=48, qk_norm=True, lora=LORA
    )
)


def with_lora(**changes) -> Decoder:
    return Decoder(dataclasses.replace(MODEL.config, lora=dataclasses.replace(LORA, **changes)))


@pytest.fixture
def edited(tmp_path):
    """`edited(config={...}, tensors=function)`: a copy of the adapter that PEFT wrote, changed."""

    def edit(tensors=lambda found: found, **config) -> Path:
        path = tmp_path / "adapter"
        shutil.copytree(ADAPTER, path)
        (path / CONFIG).write_text(json.dumps(json.loads((path / CONFIG).read_text()) | config))
        save_file(tensors(load_file(path / WEIGHTS)), path / WEIGHTS)
        return path

    return edit


def test_peft_config_has_its_meaning():
    assert is_peft(ADAPTER)
    assert not is_peft(ADAPTER.parent)
    assert read_peft_config(ADAPTER) == LORA
    every = LoraConfig(3, 6.0, PROJECTIONS, rslora=True)
    assert read_peft_config(GOLDENS / "gemma3" / "adapter") == every


def test_matrices_are_transposed_and_stacked_in_their_sharding():
    mesh = make_mesh(1, 2, 2)
    adapter, stored = load_adapter(ADAPTER, MODEL, mesh), load_file(ADAPTER / WEIGHTS)
    q_proj, down = adapter["layers"]["self_attn"]["q_proj"], adapter["layers"]["mlp"]["down_proj"]
    key = "base_model.model.model.layers.{}.{}.weight"
    expected = [stored[key.format(layer, "self_attn.q_proj.lora_A")].T for layer in range(3)]
    np.testing.assert_array_equal(q_proj["lora_A"], expected)
    expected = [stored[key.format(layer, "mlp.down_proj.lora_B")].T for layer in range(3)]
    np.testing.assert_array_equal(down["lora_B"], expected)
    drawn = init_adapter(MODEL, jax.random.key(0), mesh)
    assert jax.tree.map(jnp.shape, adapter) == jax.tree.map(jnp.shape, drawn)
    assert jax.tree.map(lambda x: (x.sharding, x.dtype), adapter) == jax.tree.map(
        lambda x: (x.sharding, x.dtype), drawn
    )
    assert not q_proj["lora_A"].sharding.is_fully_replicated


def test_written_adapter_equals_the_adapter_read(tmp_path):
    mesh = make_mesh()
    adapter = load_adapter(ADAPTER, MODEL, mesh)
    save_adapter(tmp_path / "out", MODEL, adapter, base_name="tiny-random/qwen3")
    chex.assert_trees_all_equal(load_file(tmp_path / "out" / WEIGHTS), load_file(ADAPTER / WEIGHTS))
    actual, expected = (json.loads((path / CONFIG).read_text()) for path in (tmp_path / "out", ADAPTER))
    assert actual.items() <= expected.items()
    assert {name for name, value in expected.items() if value and value != actual.get(name)} == {
        "megatron_core",
        "peft_version",
        "qalora_group_size",
    }
    with pytest.raises(FileExistsError, match="out is there already"):
        save_adapter(tmp_path / "out", MODEL, adapter, base_name=None)
    with pytest.raises(ValueError, match=r"adapter does not fit the model: got .* expected "):
        save_adapter(tmp_path / "other", with_lora(rank=2), adapter, base_name=None)
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


def test_adapter_is_readable_like_its_config(tmp_path):
    """A server is often another user; `save_file` of safetensors would leave the weights to their owner."""
    save_adapter(tmp_path / "out", MODEL, load_adapter(ADAPTER, MODEL, make_mesh()), base_name=None)
    assert len({(tmp_path / "out" / name).stat().st_mode & 0o777 for name in (CONFIG, WEIGHTS)}) == 1


def test_text_part_of_a_larger_model_keeps_names(tmp_path):
    """As PEFT names them in Gemma 3 with images; and the same adapter is read from them."""
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "gemma3", "text_config": {}}))
    adapter = load_adapter(ADAPTER, MODEL, make_mesh())
    save_adapter(tmp_path / "out", MODEL, adapter, base_name=None, source=tmp_path)
    renamed = {
        k.replace("model.layers.", "model.language_model.layers."): v for k, v in load_file(ADAPTER / WEIGHTS).items()
    }
    chex.assert_trees_all_equal(load_file(tmp_path / "out" / WEIGHTS), renamed)
    chex.assert_trees_all_equal(load_adapter(tmp_path / "out", MODEL, make_mesh()), adapter)


def test_omitted_layers_add_nothing(edited):
    path = edited(lambda found: {k: v for k, v in found.items() if ".layers.1." in k}, layers_to_transform=[1])
    assert read_peft_config(path) == LORA
    for leaf, full in zip(
        *(jax.tree.leaves(load_adapter(p, MODEL, make_mesh())) for p in (path, ADAPTER)), strict=True
    ):
        np.testing.assert_array_equal(leaf, np.where(np.arange(3)[:, None, None] == 1, full, 0))


def test_bfloat16_becomes_float32(edited):
    path = edited(lambda found: {k: np.asarray(jnp.asarray(v, jnp.bfloat16)) for k, v in found.items()})
    leaves = jax.tree.leaves(load_adapter(path, MODEL, make_mesh()))
    for leaf, full in zip(leaves, jax.tree.leaves(load_adapter(ADAPTER, MODEL, make_mesh())), strict=True):
        assert leaf.dtype == jnp.float32
        chex.assert_trees_all_equal(leaf, full.astype(jnp.bfloat16).astype(jnp.float32))


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("peft_type", "IA3", "peft_type: got 'IA3', expected 'LORA'"),
        ("r", 0, "r: got 0, expected a positive number"),
        ("target_modules", None, "target_modules: got None, expected module names"),
        ("target_modules", "(", r"target_modules: got '\(', which is no regular expression"),
        ("use_dora", True, "use_dora: got true, expected false: DoRA is not supported"),
        ("lora_bias", True, "lora_bias: got true, expected false"),
        ("bias", "all", "bias: got \"all\", expected 'none'"),
        ("fan_in_fan_out", True, "fan_in_fan_out: got true, expected false"),
        ("rank_pattern", {"q_proj": 2}, 'rank_pattern: got {"q_proj": 2}, expected one r for all modules'),
        ("alpha_pattern", {"q_proj": 2}, "alpha_pattern: got .* expected one lora_alpha for all modules"),
        ("modules_to_save", ["lm_head"], r'modules_to_save: got \["lm_head"\], expected none'),
        ("layer_replication", [[0, 2]], "layer_replication: got"),
        ("init_lora_weights", "pissa", "init_lora_weights: got 'pissa', which changes the base weights"),
        ("what_comes_next", {"a": 1}, 'what_comes_next: got {"a": 1}, expected no such field, or an empty one'),
    ],
)
def test_adapters_beyond_plain_lora_are_refused_by_name(tmp_path, field, value, message):
    (tmp_path / CONFIG).write_text(json.dumps(json.loads((ADAPTER / CONFIG).read_text()) | {field: value}))
    with pytest.raises(ValueError, match=message):
        read_peft_config(tmp_path)


@pytest.mark.parametrize(
    ("raw", "asked"),
    [
        ({"target_modules": ["q_proj", "x"]}, True),
        ({"target_modules": ["proj"]}, False),
        ({"target_modules": ["model.layers.1.self_attn.q_proj"]}, True),
        ({"target_modules": ["model.layers.2.self_attn.q_proj"]}, False),
        ({"target_modules": r".*layers\.[12]\..*_proj"}, True),
        ({"target_modules": r"self_attn\.q_proj"}, False),
        ({"target_modules": "all-linear"}, True),
        ({"target_modules": "all-linear", "exclude_modules": ["q_proj"]}, False),
        ({"target_modules": ["q_proj"], "exclude_modules": r".*layers\.1\..*"}, False),
        ({"target_modules": ["q_proj"], "layers_to_transform": 1}, True),
        ({"target_modules": ["q_proj"], "layers_to_transform": [0, 2]}, False),
        ({"target_modules": ["q_proj"], "layers_to_transform": [1], "layers_pattern": "layers"}, True),
        ({"target_modules": ["q_proj"], "layers_to_transform": [1], "layers_pattern": ["blocks"]}, False),
    ],
)
def test_module_selection_agrees_with_peft(raw, asked):
    name = "model.layers.1.self_attn.q_proj"
    assert targeted(raw, [name]) == ({name} if asked else set())


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"rank": 8}, r"adapter PATH does not fit the config: r: got 4, but lora\.rank of the config is 8"),
        (
            {"alpha": 4.0, "rslora": True},
            r"lora_alpha: got 8\.0, but lora\.alpha .* is 4\.0; use_rslora: got False, but",
        ),
        (
            {"targets": ("q_proj",)},
            r"target_modules: got \['down_proj', 'q_proj', 'v_proj'\], but lora\.targets .*\['q_",
        ),
    ],
)
def test_adapter_differing_from_the_config_names_both(changes, message):
    with pytest.raises(ValueError, match=message.replace("PATH", str(ADAPTER))):
        check_adapter(ADAPTER, with_lora(**changes))


def test_mismatched_tensors_are_named(edited, tmp_path):
    def odd(found: dict) -> dict:
        found["base_model.model.model.layers.3.self_attn.q_proj.lora_A.weight"] = np.zeros((4, 32), np.float32)
        found["base_model.model.model.layers.0.mlp.down_proj.lora_B.weight"] = np.zeros((33, 4), np.float32)
        del found["base_model.model.model.layers.2.self_attn.v_proj.lora_A.weight"]
        return found

    with pytest.raises(ValueError, match="does not fit the model") as caught:
        check_adapter(edited(odd, exclude_modules=["layers.1.self_attn.q_proj"]), MODEL)
    for part in (
        "layers.3.self_attn.q_proj.lora_A.weight is no part of the model, which has 3 layers",
        "layers.0.mlp.down_proj.lora_B.weight: got shape (33, 4), expected (32, 4)",
        "layers.1.self_attn.q_proj.lora_A.weight: not in target_modules",
        "layers.2.self_attn.v_proj.lora_A is missing",
    ):
        assert part in str(caught.value)


def test_malformed_adapter_files_are_named(edited, tmp_path):
    strange = {"base_model.model.lm_head.lora_A.weight": np.zeros((4, 32), np.float32)}
    path = edited(lambda found: found | strange)
    with pytest.raises(ValueError, match=r"got tensors base_model\.model\.lm_head\.lora_A\.weight; expected layers"):
        read_peft_config(path)
    (path / WEIGHTS).write_bytes((path / WEIGHTS).read_bytes()[:50])
    with pytest.raises(ValueError, match=f"{WEIGHTS}: not a complete safetensors file"):
        read_peft_config(path)
    (path / WEIGHTS).rename(path / "adapter_model.bin")
    with pytest.raises(
        FileNotFoundError, match=f"has no {WEIGHTS}; adapter_model.bin is not supported; save the adapter as"
    ):
        read_peft_config(path)
    with pytest.raises(FileNotFoundError, match=f"no PEFT adapter at {tmp_path}: it has no {CONFIG}"):
        read_config(tmp_path)
    with pytest.raises(ValueError, match="lora: got null, expected a lora section"):
        check_adapter(ADAPTER, Decoder(dataclasses.replace(MODEL.config, lora=None)))


MIXTURE_LORA = LoraConfig(2, 6.0, ("q_proj", "gate_proj", "up_proj", "down_proj", ROUTER), rslora=True)
EXPERTS = "base_model.model.model.layers.{}.mlp.experts.{}.weight"


def mixture(*, bias: bool = False, **changes) -> Decoder:
    """A dense layer and one with experts; experts with biases have the layout of GPT-OSS."""
    pattern = (LayerKind(mlp="dense"), LayerKind(mlp="experts"))
    experts = ExpertsConfig(count=3, active=2, width=5, bias=bias)
    lora = dataclasses.replace(MIXTURE_LORA, **changes)
    return Decoder(dataclasses.replace(MODEL.config, layers=2, pattern=pattern, experts=experts, lora=lora))


def drawn(model: Decoder) -> dict:
    """An adapter without zeros, but in dense MLPs beside experts, where it has nothing else."""
    rng = np.random.default_rng(0)

    def draw(path, leaf) -> np.ndarray:
        names = [key.key for key in path]
        dense = "mlp" in names and "experts" not in names and ROUTER not in names
        return np.float32(rng.normal(size=leaf.shape) * (not dense))

    return jax.tree_util.tree_map_with_path(draw, init_adapter(model, jax.random.key(0), make_mesh()))


def experts_of(adapter: dict) -> dict:
    """The adapters [1, 3, ...] of the projections of the experts."""
    direct = [adapter] if "experts" in adapter else []
    nested = [experts_of(part) for part in adapter.values() if isinstance(part, dict)]
    return next(filter(None, [part["experts"] for part in direct] + nested), {})


@pytest.mark.parametrize("bias", [False, True])
def test_experts_and_router_are_parameters_of_peft(tmp_path, bias):
    """The update of the weights is that of PEFT's `ParamWrapper.get_delta_weight`."""
    model, path = mixture(bias=bias), tmp_path / "out"
    adapter = drawn(model)
    save_adapter(path, model, adapter, base_name=None)
    config, stored = json.loads((path / CONFIG).read_text()), load_file(path / WEIGHTS)
    router = "mlp.router" if bias else "mlp.gate"
    assert config["target_modules"] == ["q_proj"]
    assert config["target_parameters"] == sorted(
        ["mlp.experts.down_proj", "mlp.experts.gate_up_proj", f"{router}.weight"]
    )
    assert f"base_model.model.model.layers.1.{router}.lora_A.weight" in stored
    rank, alpha = config["rank_pattern"][r".*\.gate_up_proj"], config["alpha_pattern"][r".*\.gate_up_proj"]
    lora_a, lora_b = (stored[EXPERTS.format(1, f"base_layer.lora_{name}")] for name in "AB")
    wide = (lora_b.reshape(10, rank, 3), lora_a.reshape(3, rank, 32))
    update = np.einsum("ore,eri->eoi", *wide) * alpha / rank**0.5
    parts = {name: experts_of(adapter)[name] for name in ("gate_proj", "up_proj")}
    scale = MIXTURE_LORA.scale
    gate, up = (np.swapaxes(scale * (part["lora_A"] @ part["lora_B"])[0], 1, 2) for part in parts.values())
    got = (update[:, ::2], update[:, 1::2]) if bias else (update[:, :5], update[:, 5:])
    np.testing.assert_allclose(got, (gate, up), rtol=0, atol=1e-5)
    assert read_peft_config(path) == MIXTURE_LORA
    assert set(with_adapter({"lora": {"path": str(path)}})["lora"]["targets"]) == {*MIXTURE_LORA.targets}
    chex.assert_trees_all_equal(load_adapter(path, model, make_mesh()), adapter)


def test_fused_experts_of_one_rank_share_their_a(tmp_path):
    """As PEFT writes them; B in the ranks of the other projection is an error in an adapter of twice the rank."""
    model, path = mixture(), tmp_path / "out"
    save_adapter(path, model, drawn(model), base_name=None)
    stored, config = load_file(path / WEIGHTS), json.loads((path / CONFIG).read_text())
    keys = [EXPERTS.format(1, f"base_layer.lora_{name}") for name in "AB"]
    stored[keys[1]] = np.ones_like(stored[keys[1]])
    save_file(stored, path / WEIGHTS)
    (path / "digests.json").unlink()
    with pytest.raises(ValueError, match=r"has weights in the ranks of \w+, expected zeros"):
        load_adapter(path, model, make_mesh())
    rng = np.random.default_rng(1)
    lora_a, lora_b = rng.normal(size=(6, 32)).astype(np.float32), rng.normal(size=(10, 6)).astype(np.float32)
    save_file(stored | dict(zip(keys, (lora_a, lora_b), strict=True)), path / WEIGHTS)
    (path / CONFIG).write_text(json.dumps(config | {"rank_pattern": {}, "alpha_pattern": {}}))
    experts = experts_of(load_adapter(path, model, make_mesh()))
    for number, name in enumerate(("gate_proj", "up_proj")):
        np.testing.assert_array_equal(experts[name]["lora_A"][0], lora_a.reshape(3, 2, 32).transpose(0, 2, 1))
        part = lora_b.reshape(10, 2, 3)[number * 5 : number * 5 + 5]
        np.testing.assert_array_equal(experts[name]["lora_B"][0], part.transpose(2, 1, 0))


def test_adapters_beyond_peft_name_merge(tmp_path):
    alone = mixture(targets=("gate_proj",))
    with pytest.raises(
        ValueError, match=r"got gate_proj of experts alone, which PEFT has as one with up_proj; .*--merge"
    ):
        save_adapter(tmp_path / "out", alone, drawn(alone), base_name=None)
    model = mixture()
    dense = jax.tree.map(np.ones_like, drawn(model))
    with pytest.raises(ValueError, match=r"layers\.0\.mlp\.\w+ has too: PEFT gives it to the experts alone; .*--merge"):
        save_adapter(tmp_path / "out", model, dense, base_name=None)
    assert not list(tmp_path.iterdir())
