"""Whole runs against each source: what switching changes, what a continued run goes on with, what it refuses."""

import json
import shutil
from collections.abc import Iterator
from pathlib import Path

import jax
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

import kljax
from tests import tiny
from tests.integration.command import assert_same_arrays, records, saved_arrays, state_arrays
from tests.run_programs import shared_by_runs
from train.config.errors import UserError
from train.config.load import LoadedConfig
from train.config.plan import Plan
from train.models import Decoder
from train.run.base_weights import ExpectedBase, SavedBase, check_same_base, record_folder
from train.run.run import run
from train.weights.files import read_record, write_record
from train.weights.huggingface import folder_digest, load_params
from train.weights.huggingface.config import decoder_config
from train.weights.huggingface.contents import INDEX
from train.weights.orbax import save_base

QWEN3 = Path(__file__).parents[2] / "goldens" / "models" / "qwen3"
LORA = (
    "lora={rank: 2, alpha: 4.0, targets: [q_proj, v_proj]}",
    "reference.monitor=true",
    "optim.learning_rate=1e-2",
    # The weights of the seed are the base of all.
    "warm_start.steps=0",
    # Rewards are all 0 here: this moves the policy.
    "loss.entropy_coef=1.0",
)
EMA = "reference={source: ema, decay: 0.5, monitor: true}"
BEMA = "reference={source: bema, lag: 1.0, monitor: true}"


def start(output: Path, *overrides: str, resume: bool = False, name: str = "run") -> Path:
    config = tiny.config_of(*LORA, f"output={output}", f"name={name}", *overrides)
    assert run(LoadedConfig(config, (), Path("config.yaml")), resume=resume) == 0
    return output / name


def entries_of(root: Path) -> list[dict]:
    return read_record(root / "reference.json", "")["references"]


@pytest.fixture(autouse=True, scope="module")
def _quick_runs() -> Iterator[None]:
    """Spares every run its picture and evaluations, which nothing here reads, and the programs of a run before it."""
    with pytest.MonkeyPatch.context() as patch, shared_by_runs():
        patch.setattr("train.run.run.write_curves", lambda directory: None)
        patch.setattr("train.run.loop.write_evaluation", lambda *_: None)
        yield


@pytest.fixture(scope="module")
def first(tmp_path_factory) -> Path:
    """A run of two steps against the base."""
    return start(tmp_path_factory.mktemp("first"), "steps=2")


@pytest.fixture(scope="module")
def sources(first, tmp_path_factory) -> dict[str, Path]:
    """A run of each source; without coefficients a reference is measured and no more."""
    output = tmp_path_factory.mktemp("sources")
    options = {
        "adapter": f"reference={{source: adapter, path: {first / 'checkpoints' / '2'}, monitor: true}}",
        "ema": EMA,
        "bema": BEMA,
    }
    return {name: start(output, option, "steps=2", name=name) for name, option in options.items()}


def test_switching_the_source_changes_the_kl_alone(first, sources):
    expected, kl = state_arrays(first, 2), {"base": [step["kl_reference"] for step in records(first, "train")]}
    for name, root in sources.items():
        got, steps = state_arrays(root, 2), records(root, "train")
        assert_same_arrays(got, expected)
        kl[name] = [step["kl_reference"] for step in steps]
        for step, other in zip(steps, records(first, "train"), strict=True):
            assert {key for key in other if step[key] != other[key]} <= {"kl_reference", "kl_reference_max"}
            assert step.keys() == other.keys()
    assert max(kl["base"][0], kl["ema"][0], kl["bema"][0]) < 1e-12, "all are the policy before RL"
    assert kl["adapter"][0] > 1e-6
    # The average has gone half of the way.
    assert kl["base"][1] > 1e-6
    assert kl["base"][1] / 10 < kl["ema"][1] < kl["base"][1] / 2


def test_a_moving_reference_is_saved_with_each_step(sources):
    trained = [state_arrays(sources["ema"], step) for step in (0, 1, 2)]
    adapter_leaves = {name.removeprefix("trainable.adapter."): [step[name] for step in trained] for name in trained[0]}
    for name, average in saved_arrays(sources["ema"] / "checkpoints" / "2" / "reference").items():
        start, once, twice = (x.astype(np.float64) for x in adapter_leaves[name])
        np.testing.assert_allclose(average, start / 4 + once / 4 + twice / 2, rtol=1e-6, atol=1e-9)


def test_a_corrected_average_is_saved_with_its_start(sources):
    """The run's reference is the library's, from the same weights."""
    trained = [state_arrays(sources["bema"], step) for step in (0, 1, 2)]
    start, once, twice = (
        {name: value for name, value in step.items() if name.startswith("trainable.adapter.")} for step in trained
    )
    average, _ = kljax.bema_reference(start, once, start, 1, lag=1.0)
    average, reference = kljax.bema_reference(average, twice, start, 2, lag=1.0)
    saved = saved_arrays(sources["bema"] / "checkpoints" / "2" / "reference")
    for field, expected in (("initial", start), ("average", average), ("reference", reference)):
        for name, value in expected.items():
            got = saved[name.replace("trainable.adapter", field, 1)]
            np.testing.assert_allclose(got, value, rtol=1e-6, atol=1e-9)
    moved = [name for name, value in average.items() if np.abs(value - np.asarray(reference[name])).max() > 1e-5]
    assert moved, "the correction is not 0"


@pytest.mark.parametrize(("name", "option"), [("ema", EMA), ("bema", BEMA)])
def test_continued_run_resumes_its_average(sources, tmp_path, name, option):
    """Bit by bit, as if it had never stopped."""
    root = shutil.copytree(sources[name], tmp_path / name)
    shutil.rmtree(root / "checkpoints" / "2")
    start(tmp_path, option, "steps=2", name=name, resume=True)
    for item in ("state", "reference"):
        got, expected = (saved_arrays(run / "checkpoints" / "2" / item) for run in (root, sources[name]))
        assert_same_arrays(got, expected)
    assert (root / "metrics.jsonl").read_text() == (sources[name] / "metrics.jsonl").read_text()
    assert len(entries_of(root)) == 1


def test_other_weights_at_the_same_path_are_refused(first, sources, tmp_path):
    root = shutil.copytree(sources["adapter"], tmp_path / "adapter")
    path = tmp_path / "other"
    shutil.copytree(first / "checkpoints" / "1", path)
    option = f"reference={{source: adapter, path: {path}, monitor: true}}"
    entries = entries_of(root)
    assert [entry["from_step"] for entry in entries] == [0]
    # It was another adapter that this path held when the run was started.
    entries[0]["identity"]["path"] = str(path)
    write_record(root / "reference.json", {"references": entries})
    before = (root / "metrics.jsonl").read_text()
    with pytest.raises(UserError, match=rf"^reference\.path: got {path}, whose weights are not those .* since step 0"):
        start(tmp_path, option, "steps=3", name="adapter", resume=True)
    assert (root / "metrics.jsonl").read_text() == before
    entries[0]["identity"]["path"] = "elsewhere"
    write_record(root / "reference.json", {"references": entries})
    start(tmp_path, option, "steps=2", name="adapter", resume=True)
    entries = entries_of(root)
    assert [(entry["from_step"], entry["identity"]["path"]) for entry in entries] == [(0, "elsewhere"), (2, str(path))]


def adapter_of(root: Path) -> str:
    return f"reference={{source: adapter, path: {root / 'checkpoints' / '1'}, monitor: true}}"


def test_adapter_trained_on_another_base_is_refused(first, tmp_path):
    """As soon as the base is there, which the warm start makes; no step is trained against it."""
    options = ("seed=5", "warm_start.steps=2", "steps=1")
    with pytest.raises(UserError) as caught:
        start(tmp_path, adapter_of(first), *options)
    root, message = tmp_path / "run", str(caught.value)
    assert message.startswith(f"reference.path: got {first}/checkpoints/1, an adapter of the run {first}, whose base ")
    assert f"is {first}/base (digest " in message
    assert f"but the base of this run is {root}/base (digest " in message
    assert f"warm_start.checkpoint={first}/base" in message
    assert {record["phase"] for record in map(json.loads, (root / "metrics.jsonl").read_text().splitlines())} == {
        "warm_start"
    }
    with pytest.raises(UserError, match=r"^reference\.path: .*but the base of this run is"):
        start(tmp_path, adapter_of(first), *options, resume=True)
    start(tmp_path, *options, resume=True)
    assert len(records(root, "train")) == 1


def test_base_on_disk_is_compared_before_writing(first, tmp_path):
    other, copied = tmp_path / "saved", Path(shutil.copytree(first / "base", tmp_path / "copied"))
    save_base(other, tiny.host_params())
    with pytest.raises(UserError, match=rf"^reference\.path: .*{first}/base .*the base of this run is {other} "):
        start(tmp_path, adapter_of(first), f"warm_start={{checkpoint: {other}}}")
    assert not (tmp_path / "run").exists()
    config = tiny.config_of(*LORA, adapter_of(first), f"warm_start={{checkpoint: {copied}}}", "seed=5")
    assert check_same_base(Plan.of(config), None) is None


def test_adapter_without_run_says_nothing_about_its_base(first, tmp_path, capsys):
    """Only its shape is known."""
    alone = Path(shutil.copytree(first / "checkpoints" / "1", tmp_path / "alone"))
    option = f"reference={{source: adapter, path: {alone}, monitor: true}}"
    config = tiny.config_of(*LORA, f"output={tmp_path}", "seed=5", option)
    assert check_same_base(Plan.of(config), None) is None
    # Nor does that of a run whose base was removed, which is said.
    run = tmp_path / "run"
    run.mkdir()
    shutil.copy(first / "config.yaml", run)
    moved = shutil.move(alone, run / "1")
    config = tiny.config_of(*LORA, f"output={tmp_path}", "seed=5", option.replace(str(alone), str(moved)))
    assert check_same_base(Plan.of(config), None) is None
    assert capsys.readouterr().err.startswith(f"warning: reference.path: the run {run} has no base any more")


def test_folders_are_the_same_base_by_their_weights(tmp_path):
    """Other metadata, or another split into files, is another digest of the same weights."""
    folders = [Path(shutil.copytree(QWEN3, tmp_path / name)) for name in ("one", "two")]
    text = (folders[1] / "config.json").read_text()
    (folders[1] / "config.json").write_text(text.replace("{", '{"transformers_version": "9",', 1))
    run = tmp_path / "run"
    (run / "1").mkdir(parents=True)
    (run / "config.yaml").write_text("steps: 1\n")
    record_folder(run, folders[0])

    def compared(policy: Path, *more: str) -> ExpectedBase | None:
        options = (f"model={{path: {policy}}}", "warm_start={steps: 0}", "lora.rank=2", *more)
        return check_same_base(
            Plan.of(tiny.config_of(*options, f"reference={{source: adapter, path: {run}/1, monitor: true}}")), None
        )

    for folder in folders:
        assert compared(folder) is None
    assert compared(folders[0], "warm_start.steps=1") is not None, "there is no such base yet"
    file = folders[1] / json.loads((QWEN3 / INDEX).read_text())["weight_map"]["model.norm.weight"]
    weights = load_file(file)
    save_file(weights | {"model.norm.weight": weights["model.norm.weight"] + 1}, file, metadata={"format": "pt"})
    with pytest.raises(UserError, match=rf"base is {folders[0]} .*base of this run is {folders[1]} .*model\.path="):
        compared(folders[1])


def test_folder_equals_the_base_saved_by_orbax(tmp_path):
    """Value by value, rounded to bfloat16 where one of them is."""
    params = load_params(QWEN3, Decoder(decoder_config(QWEN3)), tiny.mesh_of())
    for dtype in ("float32", "bfloat16"):
        path = tmp_path / dtype
        save_base(path, jax.tree.map(lambda x, dtype=dtype: x.astype(dtype), params))
        expected = ExpectedBase("adapter", tmp_path, SavedBase(QWEN3, digest=folder_digest(QWEN3)))
        expected.check(SavedBase(path))
        save_base(tmp_path / f"{dtype}-other", jax.tree.map(lambda x, dtype=dtype: (x * 2).astype(dtype), params))
        with pytest.raises(UserError, match=r"^reference\.path: got adapter"):
            expected.check(SavedBase(tmp_path / f"{dtype}-other"))
