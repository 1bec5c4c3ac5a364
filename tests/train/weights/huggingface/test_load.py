"""Weights of a Hugging Face folder on the devices: the file's own bits, whatever the mesh, in little memory."""

import dataclasses
import json
import shutil
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from train.models import Decoder, DecoderConfig, LayerKind
from train.models.parameters import abstract_params
from train.models.sharding import make_mesh
from train.weights.huggingface import check_folder, load_params

GOLDENS = Path(__file__).parents[3] / "goldens" / "models"
OLD = "language_model.model."  # what multimodal models began with before transformers 4.52
COMMON = {"layers": 3, "width": 32, "heads": 4, "kv_heads": 2, "mlp_width": 48}
QWEN2 = Decoder(DecoderConfig(vocab_size=160, head_dim=8, tie_embeddings=True, qkv_bias=True, **COMMON))
QWEN3 = Decoder(DecoderConfig(vocab_size=320, head_dim=16, qk_norm=True, **COMMON))
MISTRAL = Decoder(
    DecoderConfig(vocab_size=160, head_dim=16, sliding_window=6, pattern=(LayerKind("sliding"),), **COMMON)
)


def weights(folder: Path) -> dict[str, np.ndarray]:
    """The oracle: everything at once, by the library that the format is named after."""
    return {name: array for path in folder.glob("*.safetensors") for name, array in load_file(path).items()}


def assert_loaded(params: dict, expected: dict[str, np.ndarray], dtype: str = "float32") -> None:
    """Every leaf is the tensor of that name, rounded to `dtype`, and every tensor was used."""
    used = set()
    for path, leaf in jax.tree_util.tree_leaves_with_path(params):
        *modules, kind = (key.key for key in path)
        assert leaf.dtype == jnp.dtype(dtype)
        values = np.asarray(leaf)
        ending = "bias" if kind == "bias" else "weight"
        for layer in range(leaf.shape[0] if modules[0] == "layers" else 1):
            head = [] if modules[0] == "lm_head" else ["model"]
            number = ["layers", str(layer), *modules[1:]] if modules[0] == "layers" else modules
            name = ".".join([*head, *number, ending])
            got = values[layer] if modules[0] == "layers" else values
            want = expected[name].astype(dtype)
            np.testing.assert_array_equal(got, want.T if kind == "kernel" else want, err_msg=name)
            used.add(name)
    assert used == set(expected)


@pytest.mark.parametrize(("shape", "chunk_bytes"), [((1, 1, 1), 3000), ((2, 2, 2), 3000), ((1, 1, 2), 2**24)], ids=str)
def test_every_weight_arrives_unchanged_in_its_sharding(shape, chunk_bytes):
    mesh = make_mesh(*shape)
    params = load_params(GOLDENS / "qwen2", QWEN2, mesh, chunk_bytes=chunk_bytes)
    assert_loaded(params, weights(GOLDENS / "qwen2"))
    shardings = jax.tree.map(lambda x: x.sharding, params)
    assert shardings == jax.tree.map(lambda x: x.sharding, abstract_params(QWEN2, mesh))


def test_several_files_are_read_through_their_index():
    assert len(list((GOLDENS / "qwen3").glob("*.safetensors"))) == 4
    assert_loaded(load_params(GOLDENS / "qwen3", QWEN3, make_mesh(fsdp=2)), weights(GOLDENS / "qwen3"))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_bfloat16_files_are_widened_or_kept(dtype):
    model = Decoder(dataclasses.replace(MISTRAL.config, param_dtype=dtype))
    tensors = weights(GOLDENS / "mistral")
    assert tensors["lm_head.weight"].dtype == jnp.bfloat16
    assert_loaded(load_params(GOLDENS / "mistral", model, make_mesh()), tensors, dtype)


def test_float32_and_float16_files_round_once_to_bfloat16(tmp_path):
    shutil.copytree(GOLDENS / "qwen2", tmp_path / "half")
    tensors = {name: array.astype(np.float16) for name, array in weights(GOLDENS / "qwen2").items()}
    save_file(tensors, tmp_path / "half" / "model.safetensors")
    model = Decoder(dataclasses.replace(QWEN2.config, param_dtype="bfloat16"))
    assert_loaded(load_params(tmp_path / "half", model, make_mesh()), tensors, "bfloat16")
    assert_loaded(load_params(GOLDENS / "qwen2", model, make_mesh()), weights(GOLDENS / "qwen2"), "bfloat16")


def test_tied_head_may_be_repeated_but_not_different(tmp_path):
    tensors = weights(GOLDENS / "qwen2")
    embeddings = tensors["model.embed_tokens.weight"]
    save_file(tensors | {"lm_head.weight": embeddings.copy()}, tmp_path / "model.safetensors")
    assert_loaded(load_params(tmp_path, QWEN2, make_mesh(), chunk_bytes=3000), tensors)
    other = embeddings.copy()
    other[-1, -1] += 1
    save_file(tensors | {"lm_head.weight": other}, tmp_path / "model.safetensors")
    with pytest.raises(ValueError, match=r"tie_word_embeddings.*lm_head\.weight differs from model\.embed_tokens"):
        load_params(tmp_path, QWEN2, make_mesh(), chunk_bytes=3000)
    save_file(tensors | {"lm_head.weight": other[:9].copy()}, tmp_path / "model.safetensors")
    with pytest.raises(ValueError, match=r"lm_head\.weight \[9, 32\]"):
        check_folder(tmp_path, QWEN2)


@pytest.mark.parametrize("prefix", ["", OLD, "model.language_model."])
def test_names_of_bare_and_text_models_are_accepted(tmp_path, prefix):
    tensors = weights(GOLDENS / "mistral")
    heads = {"lm_head.weight": "language_model.lm_head.weight" if prefix == OLD else "lm_head.weight"}
    renamed = {heads.get(name, prefix + name.removeprefix("model.")): array for name, array in tensors.items()}
    extra = {"vision_tower.patches.weight": np.zeros(3, np.float32)} if prefix else {}
    save_file(renamed | extra, tmp_path / "model.safetensors")
    assert_loaded(load_params(tmp_path, MISTRAL, make_mesh()), tensors)


def test_missing_extra_and_misshapen_tensors_are_named_first(tmp_path):
    tensors = weights(GOLDENS / "qwen2")
    del tensors["model.layers.1.mlp.up_proj.weight"]
    tensors["model.layers.0.self_attn.sinks"] = np.zeros(4, np.float32)
    tensors["model.layers.2.self_attn.rotary_emb.inv_freq"] = np.zeros(4, np.float32)  # old releases saved this table
    tensors["model.norm.weight"] = np.zeros(31, np.float32)
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(ValueError, match="does not fit") as error:
        check_folder(tmp_path, QWEN2)
    text = str(error.value)
    assert "missing: model.layers.1.mlp.up_proj.weight;" in text
    assert "left over: model.layers.0.self_attn.sinks;" in text
    assert "model.norm.weight: got [31], expected [32]" in text
    assert "inv_freq" not in text
    with pytest.raises(ValueError, match="does not fit"):
        load_params(tmp_path, QWEN2, make_mesh())


def test_mistake_in_every_layer_is_reported_once(tmp_path):
    with pytest.raises(ValueError, match=r"missing: model\.layers\.0\.self_attn\.k_proj\.bias \(and in 2 more\), "):
        check_folder(GOLDENS / "qwen3", QWEN2)
    untied = Decoder(dataclasses.replace(QWEN2.config, tie_embeddings=False))
    with pytest.raises(ValueError, match=r"missing: lm_head\.weight; is the head tied"):
        check_folder(GOLDENS / "qwen2", untied)


def test_quantised_weights_are_not_read(tmp_path):
    tensors = weights(GOLDENS / "qwen2")
    tensors["model.norm.weight"] = tensors["model.norm.weight"].astype(np.int8)
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(ValueError, match=r"expected F32, F16, BF16.*model\.norm\.weight: got I8"):
        check_folder(tmp_path, QWEN2)


def test_folders_without_safetensors_list_their_files(tmp_path):
    with pytest.raises(FileNotFoundError, match="there is no such directory"):
        check_folder(tmp_path / "nowhere", QWEN2)
    with pytest.raises(FileNotFoundError, match="there is neither"):
        check_folder(tmp_path, QWEN2)
    (tmp_path / "pytorch_model.bin").touch()
    with pytest.raises(FileNotFoundError, match=r"got pytorch_model\.bin, expected.*save_pretrained"):
        check_folder(tmp_path, QWEN2)
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"a": "one.safetensors"}}))
    with pytest.raises(FileNotFoundError, match=r"names files that are not there: one\.safetensors"):
        check_folder(tmp_path, QWEN2)
    (tmp_path / "model.safetensors.index.json").write_text("[]")
    with pytest.raises(ValueError, match="expected a JSON object with weight_map"):
        check_folder(tmp_path, QWEN2)


def test_damaged_files_are_named(tmp_path):
    path = tmp_path / "model.safetensors"
    content = (GOLDENS / "qwen2" / "model.safetensors").read_bytes()
    for damaged in (content[:-1], content[:5], b"", b"PK\x03\x04" * 9, content[:8] + b"?" + content[9:]):
        path.write_bytes(damaged)
        with pytest.raises(ValueError, match=r"model\.safetensors: not a complete safetensors file; it is damaged or"):
            check_folder(tmp_path, QWEN2)


MEASURE = """
import ctypes, gc, json, sys
import jax, numpy as np
from train.models import Decoder, DecoderConfig
from train.weights.huggingface import load_params
from train.weights.huggingface.contents import read_contents
from train.weights.huggingface.names import full_name, leaf_mappings
from train.weights.huggingface.safetensors import write_file
from train.models.sharding import make_mesh

folder, status = sys.argv[1], "/proc/self/status"
model = Decoder(DecoderConfig(vocab_size=24576, layers=3, width=512, heads=8, kv_heads=4, head_dim=64, mlp_width=1024))
layout = {full_name(n, "model."): (np.dtype(np.float32), s.shape) for s in leaf_mappings(model) for n in s.names}
write_file(__import__("pathlib").Path(folder) / "model.safetensors", layout,
           (np.full(shape, 0.5, dtype) for dtype, shape in layout.values()))
largest = max(4 * int(np.prod(shape)) for _, shape in layout.values())

def read(field):
    with open(status) as file:
        return next(int(line.split()[1]) * 1024 for line in file if line.startswith(field))

def peak(load):
    gc.collect()
    ctypes.CDLL("libc.so.6").malloc_trim(0)
    open("/proc/self/clear_refs", "w").write("5")
    before = read("VmRSS")
    kept = load()
    params = jax.block_until_ready(kept[0])
    return (read("VmHWM") - before - sum(x.nbytes for x in jax.tree.leaves(params))) / largest

def streamed():
    return [load_params(folder, model, mesh)]

def everything():
    tensors = read_contents(folder, model).tensors.values()
    return [load_params(folder, model, mesh), [tensor.rows(0, tensor.shape[0]) for tensor in tensors]]

mesh = make_mesh(fsdp=2, tensor=2)
first = streamed()  # compiles; and it is kept, so that no memory that it gave back is taken again
print(json.dumps({"streamed": peak(streamed), "everything": peak(everything)}))
"""


@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="the peak of a process is read from Linux")
def test_host_memory_stays_below_the_largest_tensor(tmp_path):
    done = subprocess.run([sys.executable, "-c", MEASURE, str(tmp_path)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    peaks = json.loads(done.stdout.splitlines()[-1])
    assert peaks["streamed"] < 1.3, peaks
    assert peaks["everything"] > 1.3, peaks
