"""References from folders of Hugging Face and of PEFT: told apart, loaded, and refused where they do not fit."""

import dataclasses
import shutil
from pathlib import Path

import chex
import pytest

from tests import tiny
from train.config.errors import UserError
from train.config.plan import Plan
from train.config.schema import Config, Lora, WarmStart
from train.models import Decoder
from train.models.config import LoraConfig
from train.references import find
from train.references import load as references_load
from train.references.find import SavedReference
from train.references.load import check_reference, load_reference
from train.rl.policy import ScoredPolicy
from train.run.setup import check_start
from train.weights.huggingface import load_params
from train.weights.huggingface.config import decoder_config
from train.weights.peft import load_adapter, read_peft_config

MODELS = Path(__file__).parents[2] / "goldens" / "models"
QWEN2, QWEN3, LLAMA = (MODELS / name for name in ("qwen2", "qwen3", "llama3"))
LORA = LoraConfig(2, 4.0, ("q_proj",))


def config_of(policy: Path, reference: str, *overrides: str) -> Config:
    return tiny.config_of(f"model={{path: {policy}}}", "kl.loss.coef=0.1", f"reference={reference}", *overrides)


def model_of(policy: Path, lora: LoraConfig | None = None) -> Decoder:
    return Decoder(decoder_config(policy, lora=lora))


def check(config: Config, model: Decoder) -> SavedReference | None:
    return check_reference(Plan.of(config), model, tiny.mesh_of(), [])


def load(config: Config, model: Decoder) -> ScoredPolicy:
    path = config.model.path
    return load_reference(
        Plan.of(config),
        model,
        tiny.mesh_of(),
        saved=check(config, model),
        read_base=lambda: load_params(path, Decoder(dataclasses.replace(model.config, lora=None)), tiny.mesh_of()),
        checkpoints=None,
    )


def test_folder_of_another_family_has_its_decoder():
    loaded = load(config_of(QWEN2, f"{{source: checkpoint, path: {LLAMA}}}"), model_of(QWEN2, LORA))
    assert loaded.model == model_of(LLAMA)
    assert loaded.policy.adapter is None
    chex.assert_trees_all_equal(loaded.policy.params, load_params(LLAMA, model_of(LLAMA), tiny.mesh_of()))


def test_loading_takes_the_checked_reference_without_another_search(monkeypatch):
    config, model = config_of(QWEN2, f"{{source: checkpoint, path: {LLAMA}}}"), model_of(QWEN2, LORA)
    saved = check(config, model)
    assert (saved.format, saved.model) == ("folder", model_of(LLAMA))
    monkeypatch.setattr(find, "find_reference", None)
    monkeypatch.setattr(references_load, "find_reference", None)
    loaded = load_reference(
        Plan.of(config), model, tiny.mesh_of(), saved=saved, read_base=lambda: None, checkpoints=None
    )
    assert loaded.model == saved.model


@pytest.mark.parametrize("lora", [None, LORA])
def test_peft_adapter_brings_rank_scale_and_targets(lora):
    """With LoRA it shares the base of the policy; without, it has one, as the policy's own weights move."""
    config, model = config_of(QWEN3, f"{{source: adapter, path: {QWEN3 / 'adapter'}}}"), model_of(QWEN3, lora)
    plain = model_of(QWEN3)
    loaded = load(config, model)
    expected = dataclasses.replace(plain.config, lora=read_peft_config(QWEN3 / "adapter"))
    assert loaded.model == Decoder(expected)
    assert expected.lora != lora
    chex.assert_trees_all_equal(loaded.policy.adapter, load_adapter(QWEN3 / "adapter", loaded.model, tiny.mesh_of()))
    assert loaded.shares_base == (lora is not None)
    base = load_params(QWEN3, plain, tiny.mesh_of())
    chex.assert_trees_all_equal(loaded.on_base(base).policy.params, base)


@pytest.mark.parametrize(
    ("policy", "reference", "message"),
    [
        (
            QWEN2,
            "{source: checkpoint, path: QWEN3}",
            "QWEN3 has a vocabulary of 320 tokens, expected 160 as the policy",
        ),
        (
            QWEN3,
            "{source: checkpoint, path: QWEN3/adapter}",
            "QWEN3/adapter is a PEFT folder of an adapter; expected a H",
        ),
        (
            QWEN3,
            "{source: adapter, path: QWEN3}",
            "QWEN3 is a Hugging Face folder of whole weights; expected a PEFT fo",
        ),
        (QWEN3, "{source: adapter, path: GEMMA/adapter}", "adapter GEMMA/adapter does not fit the model: "),
    ],
)
def test_mismatch_is_refused_before_anything_is_loaded(policy, reference, message):
    names = {"QWEN3": str(QWEN3), "GEMMA": str(MODELS / "gemma3")}
    for name, path in names.items():
        reference, message = reference.replace(name, path), message.replace(name, path)
    with pytest.raises(UserError) as caught:
        check(config_of(policy, reference, "lora.rank=2"), model_of(policy, LORA))
    assert str(caught.value).startswith(f"reference.path: {message}")


def test_other_tokens_of_equal_number_are_refused(tmp_path):
    folders = [Path(shutil.copytree(QWEN3, tmp_path / name)) for name in ("policy", "teacher")]
    for folder, text in zip(folders, ("one", "other"), strict=True):
        (folder / "tokenizer.json").write_text(text)
    config = config_of(folders[0], f"{{source: checkpoint, path: {folders[1]}}}")
    with pytest.raises(UserError, match=r"^reference\.path: .*tokenizer.json differs from .*tokens of this reference"):
        check(config, model_of(folders[0]))
    shutil.copy(folders[0] / "tokenizer.json", folders[1] / "tokenizer.json")
    check(config, model_of(folders[0]))


def test_adapter_naming_another_base_is_warned_of(tmp_path, capsys):
    """As a reference and as what a run starts from; as the warnings of a config are shown, not as a line of a log."""
    other, adapter = Path(shutil.copytree(QWEN3, tmp_path / "another")), QWEN3 / "adapter"
    lora = read_peft_config(adapter)
    for field in ("reference.path", "lora.path"):
        for policy in (QWEN3, other):
            config = config_of(policy, f"{{source: adapter, path: {adapter}}}")
            if field == "reference.path":
                check(config, model_of(policy, LORA))
            else:
                start = config.model_copy(update={"lora": Lora(path=str(adapter)), "warm_start": WarmStart(steps=0)})
                check_start(start, model_of(policy, lora))
            expected = (
                f"warning: {field}: the adapter {adapter} says that it was trained on tiny-random/qwen3; it will be "
                f"attached to {other}\n"
            )
            assert capsys.readouterr().err == (expected if policy == other else "")
