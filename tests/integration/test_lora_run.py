"""LoRA through the command: what is trained and saved, and references that share the base or come from disk."""

import gc
from pathlib import Path

import jax
import numpy as np
import pytest

from tests.integration.command import (
    LORA,
    PPO,
    assert_same_arrays,
    files,
    records,
    run_here,
    saved_arrays,
    state_arrays,
)
from train.config.load import load
from train.run import run as run_module

STEPS = 2
VOCABULARY, WIDTH = 264, 16


@pytest.fixture(scope="module")
def first(shared):
    """A run against the base with the adapter off."""
    return shared(*LORA).succeeded()


def start_of(first, output: Path) -> tuple[str, ...]:
    """The arguments of a run that starts from the base of another."""
    return *LORA, f"warm_start.checkpoint={first.root / 'base'}", f"output={output}"


@pytest.fixture
def from_base(first, tmp_path):
    """A run that starts from the base of the first one."""
    return lambda *arguments: run_here(*start_of(first, tmp_path), *arguments)


def names(root: Path, step: int, prefix: str) -> set[str]:
    return {name.removeprefix(prefix) for name in state_arrays(root, step) if name.startswith(prefix)}


def test_only_the_adapter_is_trained_and_saved(first):
    for step in range(STEPS + 1):
        trained = names(first.root, step, "trainable.adapter.")
        assert trained
        assert all(name.split(".")[-1] in ("lora_A", "lora_B") for name in trained)
        assert names(first.root, step, "trainable.") == {f"adapter.{name}" for name in trained}
        saved = state_arrays(first.root, step)
        moments = {name for name in saved if name.startswith("opt_state.") and ".mu." in name}
        assert {name.rpartition(".mu.")[2] for name in moments} == {f"adapter.{name}" for name in trained}
        others = {name for name in saved if not name.startswith("trainable.adapter.")} - moments
        # Constants of Muon.
        others = {name for name in others if not name.endswith(".ns_coeffs")}
        assert all(saved[name].shape == () for name in others)


def test_both_halves_of_every_adapter_move(first):
    before, after = (state_arrays(first.root, step) for step in (0, STEPS))
    adapter = [name for name in before if name.startswith("trainable.adapter.")]
    assert [name for name in adapter if np.array_equal(before[name], after[name])] == []
    assert all(not before[name].any() for name in adapter if name.endswith("lora_B"))


def test_kl_to_the_base_starts_at_zero(first):
    """To the rounding of log-probs that two programs compute, whose square it is."""
    kl = [record["kl_reference"] for record in records(first.root, "train")]
    assert 0 <= kl[0] < 1e-12
    assert kl[1] > 1e-9


def test_the_base_is_shared_and_never_written(monkeypatch, tmp_path):
    """By looking at the arrays: one copy of the weights, the same bits at the end."""

    def live_tables():
        gc.collect()
        tables = [array for array in jax.live_arrays() if array.shape == (VOCABULARY, WIDTH)]
        return {shard.data.unsafe_buffer_pointer() for array in tables for shard in array.addressable_shards}

    # Other tests of this process may hold some.
    seen, before_run = {}, live_tables()

    def looking_start_reference(*arguments, **options):
        actual = run_module_begin(*arguments, **options)
        seen["reference"], seen["base"] = actual[0].reference, options["base"]
        seen["bits"] = [np.array(leaf) for leaf in jax.tree.leaves(options["base"])]
        return actual

    def looking_assert_unchanged(frozen, before):
        run_module_assert(frozen, before)
        seen["embeddings"] = live_tables() - before_run

    run_module_begin, run_module_assert = run_module.start_reference, run_module.assert_unchanged
    monkeypatch.setattr(run_module, "start_reference", looking_start_reference)
    monkeypatch.setattr(run_module, "assert_unchanged", looking_assert_unchanged)
    assert run_module.run(load(LORA[0], [*LORA[1:], "eval.every=2", f"output={tmp_path}"])) == 0
    base, reference = seen["base"], seen["reference"]
    assert reference.shares_base
    assert reference.policy.adapter is None
    # No second table and no moments of it either: of all arrays of that shape, each lies in the same memory.
    assert seen["embeddings"] == {base["embed_tokens"]["embedding"].unsafe_buffer_pointer()}
    after = [np.asarray(leaf).tobytes() for leaf in jax.tree.leaves(base)]
    assert after == [leaf.tobytes() for leaf in seen["bits"]]
    saved = saved_arrays(tmp_path / "lora" / "base")
    assert_same_arrays(saved, dict(zip(saved, map(np.asarray, jax.tree.leaves(base)), strict=True)))


def test_a_saved_adapter_as_the_reference(first, from_base):
    before = files(first.root)
    path = first.root / "checkpoints" / str(STEPS)
    second = from_base(f"reference={{source: adapter, path: {path}}}").succeeded()
    assert_same_arrays(saved_arrays(second.root / "base"), saved_arrays(first.root / "base"))
    # The new adapter is still off, the reference's is not.
    kl = [record["kl_reference"] for record in records(second.root, "train")]
    assert kl[0] > 0
    # Nothing but the reference differs: the first policy samples the same completions.
    rewards = [records(run.root, "train")[0]["reward"] for run in (first, second)]
    assert rewards[0] == rewards[1] > 0
    assert files(first.root) == before


def test_saved_base_as_the_reference_is_the_base(first, from_base):
    second = from_base(f"reference={{source: checkpoint, path: {first.root / 'base'}, monitor: exact}}").succeeded()
    assert (second.root / "metrics.jsonl").read_text() == "".join(
        line
        for line in (first.root / "metrics.jsonl").read_text().splitlines(keepends=True)
        if '"warm_start"' not in line
    )


def test_a_checkpoint_of_another_run_as_the_reference(first, from_base, shared):
    other = shared(*PPO).succeeded()
    path = other.root / "checkpoints" / "4"
    second = from_base(f"reference={{source: checkpoint, path: {path}}}").succeeded()
    assert records(second.root, "train")[0]["kl_reference"] > 0


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("reference={source: adapter, path: NOTHING}", "reference.path: no readable checkpoint at NOTHING"),
        ("reference={source: adapter, path: BASE}", "reference.path: checkpoint BASE does not fit: "),
        ("reference={source: checkpoint, path: STEP}", "reference.path: checkpoint STEP/state does not fit: "),
        ("reference={source: step, step: 1}", "reference.step: got 1, but this run has no such checkpoint"),
        ("warm_start.checkpoint=NOTHING", "warm_start.checkpoint: no readable checkpoint at NOTHING"),
        ("model.width=32", "warm_start.checkpoint: checkpoint BASE does not fit: "),
    ],
)
def test_unusable_references_are_named(first, from_base, tmp_path_factory, override, message):
    places = {
        "NOTHING": tmp_path_factory.mktemp("nothing"),
        "BASE": first.root / "base",
        "STEP": first.root / "checkpoints" / str(STEPS),
    }
    for name, position in places.items():
        override, message = override.replace(name, str(position)), message.replace(name, str(position))
    done = from_base(override)
    assert done.returncode == 2, done.stderr
    assert f"error: {message}" in done.stderr
    assert "Traceback" not in done.stderr
