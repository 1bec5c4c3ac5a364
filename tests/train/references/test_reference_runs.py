"""Whole runs against each source: what switching changes, what a continued run goes on with, what it refuses."""

import json
import shutil
from collections.abc import Iterator
from pathlib import Path

import jax
import numpy as np
import pytest

from tests import tiny
from tests.integration.command import assert_same_arrays, records, saved_arrays, state_arrays
from train.config.load import LoadedConfig
from train.errors import UserError
from train.run import run

LORA = (
    "lora={rank: 2, alpha: 4.0, targets: [q_proj, v_proj]}",
    "reference.monitor=true",
    "optim.learning_rate=1e-2",
    "eval={every: 100, prompts: 2, batch_size: 2}",
    # The weights of the seed are the base of all.
    "warm_start.steps=0",
    # Rewards are all 0 here: this moves the policy.
    "loss.entropy_coef=1.0",
)
EMA = "reference={source: ema, decay: 0.5, monitor: true}"


@pytest.fixture(scope="module", autouse=True)
def _programs_are_kept(tmp_path_factory) -> Iterator[None]:
    """Runs of one shape compile their programs once, as they would in processes with a cache on disk."""
    settings = {
        "jax_compilation_cache_dir": str(tmp_path_factory.mktemp("programs")),
        "jax_persistent_cache_min_compile_time_secs": 0,
        "jax_persistent_cache_min_entry_size_bytes": -1,
    }
    before = {name: getattr(jax.config, name) for name in settings}
    for name, value in settings.items():
        jax.config.update(name, value)
    yield
    for name, value in before.items():
        jax.config.update(name, value)


def start(output: Path, *overrides: str, resume: bool = False, name: str = "run") -> Path:
    config = tiny.config_of(*LORA, f"output={output}", f"name={name}", *overrides)
    assert run(LoadedConfig(config, (), Path("config.yaml")), resume=resume) == 0
    return output / name


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
    }
    return {name: start(output, option, "steps=2", name=name) for name, option in options.items()}


def test_switching_the_source_changes_the_kl_and_nothing_else(first, sources):
    expected, kl = state_arrays(first, 2), {"base": [step["kl_reference"] for step in records(first, "train")]}
    for name, root in sources.items():
        got, steps = state_arrays(root, 2), records(root, "train")
        assert_same_arrays(got, expected)
        kl[name] = [step.pop("kl_reference") for step in steps]
        for step, other in zip(steps, records(first, "train"), strict=True):
            assert step == {key: value for key, value in other.items() if key != "kl_reference"}
    assert max(kl["base"][0], kl["ema"][0]) < 1e-12, "both are the policy before RL"
    assert kl["adapter"][0] > 1e-6
    # The average has gone half of the way.
    assert kl["base"][1] > 1e-6
    assert kl["base"][1] / 10 < kl["ema"][1] < kl["base"][1] / 2


def test_a_moving_reference_is_saved_with_each_step(sources):
    trained = [state_arrays(sources["ema"], step) for step in (0, 1, 2)]
    held = {name.removeprefix("trainable.adapter."): [step[name] for step in trained] for name in trained[0]}
    for name, average in saved_arrays(sources["ema"] / "checkpoints" / "2" / "reference").items():
        start, once, twice = (x.astype(np.float64) for x in held[name])
        np.testing.assert_allclose(average, start / 4 + once / 4 + twice / 2, rtol=1e-6, atol=1e-9)


def test_a_continued_run_goes_on_with_the_average_it_had(sources, tmp_path):
    """Bit by bit, as if it had never stopped."""
    root = shutil.copytree(sources["ema"], tmp_path / "ema")
    shutil.rmtree(root / "checkpoints" / "2")
    start(tmp_path, EMA, "steps=2", name="ema", resume=True)
    for item in ("state", "reference"):
        got, expected = (saved_arrays(run / "checkpoints" / "2" / item) for run in (root, sources["ema"]))
        assert_same_arrays(got, expected)
    assert (root / "metrics.jsonl").read_text() == (sources["ema"] / "metrics.jsonl").read_text()
    assert len(json.loads((root / "reference.json").read_text())) == 1


def test_other_weights_at_the_same_path_are_refused_by_name(first, sources, tmp_path):
    root = shutil.copytree(sources["adapter"], tmp_path / "adapter")
    path = tmp_path / "other"
    shutil.copytree(first / "checkpoints" / "1", path)
    option = f"reference={{source: adapter, path: {path}, monitor: true}}"
    entries = json.loads((root / "reference.json").read_text())
    assert [entry["from_step"] for entry in entries] == [0]
    # It was another adapter that this path held when the run was started.
    entries[0]["identity"]["path"] = str(path)
    (root / "reference.json").write_text(json.dumps(entries))
    before = (root / "metrics.jsonl").read_text()
    with pytest.raises(UserError, match=rf"^reference\.path: got {path}, whose weights are not those .* since step 0"):
        start(tmp_path, option, "steps=3", name="adapter", resume=True)
    assert (root / "metrics.jsonl").read_text() == before
    entries[0]["identity"]["path"] = "elsewhere"
    (root / "reference.json").write_text(json.dumps(entries))
    start(tmp_path, option, "steps=2", name="adapter", resume=True)
    entries = json.loads((root / "reference.json").read_text())
    assert [(entry["from_step"], entry["identity"]["path"]) for entry in entries] == [(0, "elsewhere"), (2, str(path))]
