"""Checkpoints: which steps stay, what a killed save leaves, and what damage does to the ones that are whole."""

import contextlib
import dataclasses
import logging
import os
import shutil
from pathlib import Path

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
import pytest
from jax.sharding import Mesh

import kljax
from kljax.checkpoint import array_digest, read_metadata, seal
from tests import tiny
from train.config.errors import UserError
from train.config.plan import Plan
from train.config.schema import Checkpoint
from train.models.sharding import make_mesh, replicated
from train.rl.state import TrainState, initial_state
from train.run.setup import first_state
from train.weights.emergency import abstract
from train.weights.late_read_errors import quiet_abandoned_reads
from train.weights.orbax import RunCheckpoints, restore_base, save_base

SECTION = Checkpoint(every=1, keep=2)
CONTROLLERS = {"reward": kljax.fixed_kl(0.1), "loss": kljax.pi_kl(0.1, target=0.1, kp=0.1, ki=0.1)}


@pytest.fixture(autouse=True)
def _quiet():
    quiet_abandoned_reads()
    level = logging.getLogger("absl").level
    logging.getLogger("absl").setLevel(logging.CRITICAL)
    yield
    logging.getLogger("absl").setLevel(level)


def state_of(step: int, width: int = 4, **more) -> TrainState:
    """A small state that a step number tells from every other, large enough to have a data file of its own."""
    trainable = {"params": {"w": jnp.arange(width * 300.0).reshape(width, 300) + step, "b": jnp.full(width, step / 3)}}
    state = initial_state(trainable | more, optax.adamw(1e-3), CONTROLLERS, replicated(tiny.mesh_of()))
    return jax.device_put(dataclasses.replace(state, step=jnp.int32(step)), replicated(tiny.mesh_of()))


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The directory of a run with checkpoints of steps 0 to 4."""
    root = tmp_path_factory.mktemp("run")
    checkpoints = RunCheckpoints(root / "checkpoints", SECTION)
    for step in range(5):
        checkpoints.save(state_of(step), step)
    checkpoints.close()
    return root


@pytest.fixture
def run(saved: Path, tmp_path: Path) -> Path:
    """A copy that a test may damage."""
    return Path(shutil.copytree(saved, tmp_path / "run"))


def opened(run: Path) -> RunCheckpoints:
    return RunCheckpoints(run / "checkpoints", SECTION)


def test_step_0_and_the_newest_are_retained(saved):
    checkpoints = opened(saved)
    assert checkpoints.steps() == [0, 3, 4]
    assert sorted(path.name for path in (saved / "checkpoints").iterdir()) == ["0", "3", "4"]
    assert checkpoints.path(3) == saved / "checkpoints" / "3" / "state"
    with pytest.raises(UserError, match=r"^reference\.step: got 2, .* there are: 0, 3, 4$"):
        checkpoints.path(2)
    checkpoints.close()


def test_steps_divisible_by_a_number_are_retained(tmp_path):
    section = Checkpoint(every=1, keep=1, keep_every=3)
    with contextlib.closing(RunCheckpoints(tmp_path, section, pinned=[2])) as checkpoints:
        for step in range(9):
            checkpoints.save(state_of(step), step)
        checkpoints.wait()
        assert checkpoints.steps() == [0, 2, 3, 6, 8]
    with contextlib.closing(RunCheckpoints(tmp_path, SECTION)) as checkpoints:
        checkpoints.save(state_of(9), 9)
        checkpoints.wait()
        assert checkpoints.steps() == [0, 8, 9]


def test_the_newest_state_comes_back_bit_for_bit(saved):
    checkpoints = opened(saved)
    restored = checkpoints.restore_last(state_of(9))
    checkpoints.close()
    chex.assert_trees_all_equal(restored, state_of(4))
    chex.assert_trees_all_equal_dtypes(restored, state_of(4))
    assert abstract(restored) == abstract(state_of(4))


def test_a_run_without_checkpoints_has_nothing_to_restore(tmp_path):
    checkpoints = opened(tmp_path)
    assert checkpoints.steps() == []
    assert checkpoints.restore_last(state_of(0)) is None
    with pytest.raises(UserError, match="there are: none"):
        checkpoints.path(0)
    checkpoints.close()


def test_saved_state_is_the_state_at_the_call(tmp_path):
    checkpoints = opened(tmp_path)
    state = jax.tree.map(lambda x: jnp.tile(x, (1, 200)) if x.ndim > 1 else x, state_of(1))
    expected = jax.tree.map(np.array, state)
    step = jax.jit(lambda s: jax.tree.map(lambda x: x + 1, s), donate_argnums=0)
    checkpoints.save(state, 1)
    for _ in range(3):
        state = step(state)  # gives the saved buffers away while they are being written
    restored = checkpoints.restore_last(state)
    checkpoints.close()
    chex.assert_trees_all_equal(jax.device_get(restored), expected)


def data_file(state: Path) -> Path:
    return max((path for path in (state / "d").iterdir()), key=lambda path: path.stat().st_size)


DAMAGES = {
    "metadata emptied": lambda state: os.truncate(state / "_METADATA", 0),
    "metadata cut": lambda state: os.truncate(state / "_METADATA", 500),
    "metadata deleted": lambda state: (state / "_METADATA").unlink(),
    "manifest emptied": lambda state: os.truncate(state / "manifest.ocdbt", 0),
    "manifest cut": lambda state: os.truncate(state / "manifest.ocdbt", 50),
    "manifest deleted": lambda state: (state / "manifest.ocdbt").unlink(),
    "data emptied": lambda state: os.truncate(data_file(state), 0),
    "data cut": lambda state: os.truncate(data_file(state), data_file(state).stat().st_size - 1),
    "data deleted": lambda state: data_file(state).unlink(),
    "state deleted": shutil.rmtree,
}


@pytest.mark.parametrize("damage", DAMAGES.values(), ids=DAMAGES)
def test_damaged_checkpoint_is_set_aside_for_the_previous(run, caplog, damage):
    damage(run / "checkpoints" / "4" / "state")
    checkpoints = opened(run)
    restored = checkpoints.restore_last(state_of(9))
    chex.assert_trees_all_equal(restored, state_of(3))
    assert checkpoints.steps() == [0, 3]
    (warning,) = [record.getMessage() for record in caplog.records if record.name == "train.weights.orbax"]
    assert f"checkpoint {run}/checkpoints/4 is damaged and was skipped (moved to {run}/damaged/4-0): " in warning
    assert (run / "damaged" / "4-0").is_dir()
    # The run goes on and saves the step again.
    checkpoints.save(state_of(4), 4)
    checkpoints.wait()
    assert checkpoints.steps() == [0, 3, 4]
    checkpoints.close()


def test_damage_of_every_checkpoint_restores_and_loses_nothing(run, caplog):
    for step in (0, 3, 4):
        os.truncate(run / "checkpoints" / str(step) / "state" / "manifest.ocdbt", 0)
    checkpoints = opened(run)
    assert checkpoints.restore_last(state_of(9)) is None
    checkpoints.close()
    assert len(caplog.records) == 3
    assert sorted(path.name for path in (run / "damaged").iterdir()) == ["0-2", "3-1", "4-0"]


def test_leftovers_of_a_killed_save_are_removed(run):
    left = run / "checkpoints" / "5.orbax-checkpoint-tmp"
    shutil.copytree(run / "checkpoints" / "4", left)
    data_file(left / "state").unlink()
    checkpoints = opened(run)
    assert checkpoints.steps() == [0, 3, 4]
    chex.assert_trees_all_equal(checkpoints.restore_last(state_of(9)), state_of(4))
    checkpoints.save(state_of(5), 5)
    checkpoints.close()
    assert sorted(path.name for path in (run / "checkpoints").iterdir()) == ["0", "4", "5"]
    assert not (run / "damaged").exists()


OTHERS = {
    "shape": (lambda: state_of(9, width=5), r"trainable\.params\.w: got float32\[4, 300\], expected float32\[5, 300\]"),
    "more weights": (
        lambda: state_of(9, value_head={"bias": jnp.zeros(())}),
        r"trainable\.value_head\.bias: got None, expected float32\[\]",
    ),
    "dtype": (
        lambda: jax.tree.map(lambda x: x.astype(jnp.bfloat16) if x.ndim == 2 else x, state_of(9)),
        r"trainable\.params\.w: got float32\[4, 300\], expected bfloat16\[4, 300\]",
    ),
}


@pytest.mark.parametrize(("like", "message"), OTHERS.values(), ids=OTHERS)
def test_complete_checkpoint_of_another_layout_is_an_error(run, caplog, like, message):
    before = sorted(path.relative_to(run) for path in run.rglob("*"))
    checkpoints = opened(run)
    with pytest.raises(UserError, match=rf"checkpoints/4 does not fit this config: .*{message}"):
        checkpoints.restore_last(like())
    checkpoints.close()
    assert sorted(path.relative_to(run) for path in run.rglob("*")) == before
    assert not caplog.records
    chex.assert_trees_all_equal(opened(run).restore_last(state_of(9)), state_of(4))


def test_experts_are_restored_over_other_devices(tmp_path):
    """With their optimizer's moments, as axis expert splits them, and as it does not."""
    config = tiny.config_of("model.experts={count: 4, active: 2, width: 8}")
    model, optimizer, plan = tiny.model_of(config), optax.adamw(1e-3), Plan.of(config)

    def state_on(mesh: Mesh, seed: int) -> TrainState:
        drawn = jax.device_get(tiny.drawn(model, jax.random.key(seed)))
        return first_state(plan, model, mesh, tiny.placed(kljax.Policy(drawn), model, mesh).params, optimizer)

    meshes = [make_mesh(data=2, expert=4), make_mesh(fsdp=2, expert=2, tensor=2), make_mesh(tensor=2)]
    for number, mesh in enumerate(meshes):
        checkpoints, like = RunCheckpoints(tmp_path / str(number), SECTION), state_on(meshes[number - 1], 1)
        saved = state_on(mesh, 0)
        checkpoints.save(saved, 0)
        checkpoints.wait()
        restored = checkpoints.restore_last(like)
        checkpoints.close()
        chex.assert_trees_all_equal(jax.device_get(restored.trainable), jax.device_get(saved.trainable))
        assert all(
            jax.tree.leaves(jax.tree.map(lambda x, y: x.sharding == y.sharding, restored.opt_state, like.opt_state))
        )


def test_base_is_restored_in_the_requested_layout(tmp_path):
    params = {"w": jnp.arange(64.0).reshape(8, 8)}
    save_base(tmp_path / "base", params)
    mesh = tiny.mesh_of(1, 4, 2)
    sharding = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("fsdp", "tensor"))
    like = {"w": jax.ShapeDtypeStruct((8, 8), jnp.float32, sharding=sharding)}
    restored = restore_base(tmp_path / "base", like, "warm_start.checkpoint")
    chex.assert_trees_all_equal(restored, params)
    assert restored["w"].sharding == sharding
    other = {"w": jax.ShapeDtypeStruct((8, 4), jnp.float32, sharding=sharding)}
    with pytest.raises(UserError, match=r"^warm_start\.checkpoint: .*w: got float32\[8, 8\], expected float32\[8, 4\]"):
        restore_base(tmp_path / "base", other, "warm_start.checkpoint")
    with pytest.raises(UserError, match=r"^base: no checkpoint at .*nowhere"):
        restore_base(tmp_path / "nowhere", like, "base")


BASE_DAMAGES = {name: damage for name, damage in DAMAGES.items() if name != "state deleted"}


@pytest.mark.parametrize("damage", BASE_DAMAGES.values(), ids=BASE_DAMAGES)
def test_a_damaged_base_is_named(tmp_path, damage):
    params = {"w": jnp.arange(4096.0).reshape(64, 64), "b": jnp.zeros(3)}
    save_base(tmp_path / "base", params)
    damage(tmp_path / "base")
    with pytest.raises(UserError, match=rf"^base: .*{tmp_path}/base"):
        restore_base(tmp_path / "base", abstract(params), "base")


def test_moving_reference_is_a_separate_item(tmp_path):
    """A state looks the same whatever it is measured against: switching the reference finds every checkpoint."""
    moving, plain = {"w": jnp.arange(3.0), "b": jnp.full(2, 0.25)}, state_of(1)
    checkpoints = RunCheckpoints(tmp_path / "checkpoints", SECTION)
    checkpoints.save(plain, 0)
    checkpoints.save(dataclasses.replace(plain, reference=moving), 1)
    checkpoints.wait()
    assert (tmp_path / "checkpoints" / "1" / "reference").is_dir()
    like = dataclasses.replace(plain, reference=jax.tree.map(jnp.zeros_like, moving))
    restored = checkpoints.restore_last(like)
    chex.assert_trees_all_equal(restored, dataclasses.replace(plain, reference=moving))
    assert checkpoints.restore_last(plain).reference is None
    other = dataclasses.replace(plain, reference={"w": jnp.zeros(4)})
    assert checkpoints.restore_last(other).reference is None, "that of another layout is not it"
    shutil.rmtree(tmp_path / "checkpoints" / "1")
    checkpoints.close()
    fresh = RunCheckpoints(tmp_path / "checkpoints", SECTION)
    restored = fresh.restore_last(like)
    fresh.close()
    chex.assert_trees_all_equal(restored, plain)


def test_a_state_without_a_controller_comes_back(tmp_path):
    checkpoints = opened(tmp_path)
    state = dataclasses.replace(state_of(1), controllers={})
    checkpoints.save(state, 1)
    restored = checkpoints.restore_last(dataclasses.replace(state_of(9), controllers={}))
    checkpoints.close()
    assert restored.controllers == {}
    chex.assert_trees_all_equal(restored, state)


def test_every_item_carries_the_digests_of_its_arrays(tmp_path):
    checkpoints = RunCheckpoints(tmp_path / "checkpoints", SECTION)
    state = dataclasses.replace(state_of(1), reference={"w": jnp.arange(3.0)})
    checkpoints.carry = lambda: {"note": [1, 2]}
    checkpoints.save(state, 1)
    checkpoints.wait()
    assert checkpoints.carried(1)["note"] == [1, 2]
    checkpoints.close()
    record = read_metadata(tmp_path / "checkpoints" / "1" / "state").content
    assert record["arrays"]["trainable.params.w"] == array_digest(state.trainable["params"]["w"])
    assert len(record["arrays"]) == len(jax.tree.leaves(state)) - 1
    moving = read_metadata(tmp_path / "checkpoints" / "1" / "reference").content
    assert moving == {"arrays": {"w": array_digest(np.arange(3, dtype=np.float32))}, "step": 1}


def test_a_checkpoint_of_another_run_is_refused(run):
    with contextlib.closing(RunCheckpoints(run / "checkpoints", SECTION, run_id="ab12")) as checkpoints:
        with pytest.raises(UserError, match=r"checkpoints/4 is of another run: its id is None, .* move it out of"):
            checkpoints.restore_last(state_of(9))
        assert checkpoints.steps()[-1] == 4


def test_a_step_under_another_number_is_set_aside(run, caplog):
    shutil.copytree(run / "checkpoints" / "3", run / "checkpoints" / "7")
    with contextlib.closing(opened(run)) as checkpoints:
        chex.assert_trees_all_equal(checkpoints.restore_last(state_of(9)), state_of(4))
        assert "checkpoints/7 is a copy: it was saved after step 3" in caplog.text
        assert checkpoints.steps()[-1] == 4


def test_checkpoint_without_digests_is_read_with_warnings(tmp_path, caplog):
    params = {"w": jnp.arange(6.0)}
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(tmp_path / "base", params)
    chex.assert_trees_all_equal(restore_base(tmp_path / "base", abstract(params), "base"), params)
    assert [record.getMessage() for record in caplog.records if record.name == "train.weights.orbax"] == [
        f"{tmp_path}/base has no digests, so damage to its arrays would not be noticed"
    ]


def test_former_digests_are_read_with_a_warning(tmp_path, caplog):
    params, former = {"w": jnp.arange(4.0)}, seal({"arrays": {"w": "float32[4] 0123456789abcdef"}})
    with ocp.Checkpointer(ocp.StandardCheckpointHandler()) as checkpointer:
        checkpointer.save(tmp_path / "base", args=ocp.args.StandardSave(params, custom_metadata=former))
    restored = restore_base(tmp_path / "base", abstract(params), "base")
    assert jnp.array_equal(restored["w"], params["w"])
    assert "has digests of version 0.2, which are not compared" in caplog.text


def test_a_damaged_record_of_digests_is_damage(run, caplog):
    path = run / "checkpoints" / "4" / "state" / "_METADATA"
    path.write_text(path.read_text().replace("float32[4, 300] ", "float32[4, 300]  ", 1))
    checkpoints = opened(run)
    chex.assert_trees_all_equal(checkpoints.restore_last(state_of(9)), state_of(3))
    checkpoints.close()
    assert "its record of digests is damaged" in caplog.text


def test_a_restore_reads_the_metadata_once(tmp_path, monkeypatch):
    params, reads = {"w": jnp.arange(6.0)}, []
    save_base(tmp_path / "base", params)
    checkpoints, state = opened(tmp_path), dataclasses.replace(state_of(1), reference=params)
    checkpoints.save(state, 1)
    checkpoints.wait()
    read = ocp.Checkpointer.metadata
    monkeypatch.setattr(ocp.Checkpointer, "metadata", lambda self, path: reads.append(path.name) or read(self, path))
    chex.assert_trees_all_equal(restore_base(tmp_path / "base", abstract(params), "base"), params)
    chex.assert_trees_all_equal(checkpoints.restore_last(state), state)
    checkpoints.close()
    assert reads == ["base", "state", "reference"]


def test_reports_out_of_memory_not_damage(run, monkeypatch):
    def fail(*_, **__):
        raise MemoryError

    checkpoints = opened(run)
    monkeypatch.setattr(checkpoints, "_restore", fail)
    with pytest.raises(MemoryError):
        checkpoints.restore_last(state_of(9))
    checkpoints.close()
    assert not (run / "damaged").exists()
