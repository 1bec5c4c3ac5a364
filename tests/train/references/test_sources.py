"""Every source of a reference: what is restored, what is shared, what is said when it is not there."""

from pathlib import Path

import chex
import jax
import numpy as np
import optax
import orbax.checkpoint as ocp
import pytest

import kljax
from tests import tiny
from train.config.errors import UserError
from train.config.plan import Plan
from train.config.schema import Checkpoint, Config
from train.models.parameters import abstract_params, init_adapter
from train.references.find import locate
from train.references.load import check_reference, load_reference
from train.references.record import assert_unchanged, read_entries, record_reference, reference_fingerprint
from train.rl.keys import purpose_key
from train.rl.policy import ScoredPolicy
from train.rl.reference import FrozenWeights
from train.rl.state import GuardState, TrainState
from train.weights.orbax import RunCheckpoints, restore_base, save_base

LORA = "lora={rank: 2, alpha: 4.0, targets: [q_proj, v_proj]}"
NEEDED = "kl.loss.coef=0.1"


def config_of(source: str, *overrides: str, lora: bool = False) -> Config:
    return tiny.config_of(NEEDED, f"reference={source}", *([LORA] if lora else []), *overrides)


def adapter_of(step: int):
    """An adapter that a step number tells from every other; neither half of it is 0."""
    config = tiny.config_of(LORA)
    drawn = init_adapter(tiny.model_of(config), purpose_key(step, "adapter"), tiny.mesh_of())
    return jax.tree.map(lambda x: x + 1 + step, drawn)


def state_of(lora: bool, step: int) -> TrainState:
    trainable = {"adapter": adapter_of(step)} if lora else {"params": tiny.moved(tiny.host_params(), 0.01 * step)}
    opt_state, controller = optax.identity().init(trainable), kljax.fixed_kl(0.0).init()
    state = TrainState(jax.numpy.int32(step), trainable, opt_state, {"reward": controller}, GuardState.initial())
    return jax.device_put(state, jax.sharding.NamedSharding(tiny.mesh_of(), jax.sharding.PartitionSpec()))


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> dict[bool, Path]:
    """A run of all weights and one of an adapter, each with its base and the checkpoints 0 and 3."""
    roots = {lora: tmp_path_factory.mktemp("lora" if lora else "full") for lora in (False, True)}
    for lora, root in roots.items():
        save_base(root / "base", jax.tree.map(jax.numpy.asarray, tiny.host_params()))
        checkpoints = RunCheckpoints(root / "checkpoints", Checkpoint(every=1, keep=2))
        for step in (0, 3):
            checkpoints.save(state_of(lora, step), step)
        checkpoints.close()
    return roots


def load(config: Config, root: Path) -> kljax.Policy | None:
    model, mesh = tiny.model_of(config), tiny.mesh_of(config.mesh.data, config.mesh.fsdp, config.mesh.tensor)
    checkpoints = RunCheckpoints(root / "checkpoints", Checkpoint(every=1, keep=2))

    def read_base():
        return restore_base(root / "base", abstract_params(model, mesh), "base")

    try:
        saved = check_reference(Plan.of(config), model, mesh, checkpoints.steps())
        loaded = load_reference(Plan.of(config), model, mesh, saved=saved, read_base=read_base, checkpoints=checkpoints)
    finally:
        checkpoints.close()
    return None if loaded is None else loaded.policy


def pointers(tree) -> list[int]:
    return [leaf.unsafe_buffer_pointer() for leaf in jax.tree.leaves(tree)]


def test_unneeded_reference_is_not_loaded(tmp_path):
    config = tiny.config_of("reference={source: step, step: 2}")
    assert load(config, tmp_path) is None
    assert load(tiny.config_of("kl.rollout.coef=0.1"), tmp_path) is None


def test_metric_alone_needs_a_reference(runs):
    assert load(tiny.config_of("reference.monitor=true"), runs[False]) is not None


def test_adapter_base_is_the_weights_of_the_policy(runs):
    reference = load(config_of("{source: base}", lora=True), runs[True])
    assert reference.adapter is None
    assert reference.params is None, "no second copy of the weights"


def test_base_of_a_moving_policy_is_read_again(runs):
    reference = load(config_of("{source: base}"), runs[False])
    chex.assert_trees_all_equal(jax.device_get(reference.params), tiny.host_params())
    assert reference.adapter is None


def test_a_step_of_all_weights(runs):
    reference = load(config_of("{source: step, step: 3}"), runs[False])
    chex.assert_trees_all_equal(jax.device_get(reference), kljax.Policy(tiny.moved(tiny.host_params(), 0.03)))


def test_a_step_of_an_adapter_shares_the_base(runs):
    reference = load(config_of("{source: step, step: 3}", lora=True), runs[True])
    chex.assert_trees_all_equal(reference.adapter, adapter_of(3))
    assert reference.params is None


@pytest.mark.parametrize("place", ["checkpoints/3", "checkpoints/3/state", "plain"])
def test_adapter_comes_from_a_run_or_alone(runs, tmp_path, place):
    path = runs[True] / place
    if place == "plain":
        path = tmp_path / "adapter"
        with ocp.StandardCheckpointer() as checkpointer:
            checkpointer.save(path, adapter_of(3))
    reference = load(config_of(f"{{source: adapter, path: {path}}}", lora=True), runs[True])
    chex.assert_trees_all_equal(reference.adapter, adapter_of(3))
    assert reference.params is None


@pytest.mark.parametrize("place", ["base", "checkpoints/3", "checkpoints/3/state", "plain"])
def test_checkpoint_of_another_run_or_weights_alone(runs, tmp_path, place):
    path, expected = runs[False] / place, {"base": tiny.host_params()}.get(place, tiny.moved(tiny.host_params(), 0.03))
    if place == "plain":
        path, expected = tmp_path / "weights", tiny.moved(tiny.host_params(), 0.1)
        save_base(path, jax.tree.map(jax.numpy.asarray, expected))
    reference = load(config_of(f"{{source: checkpoint, path: {path}}}"), tmp_path)
    chex.assert_trees_all_equal(jax.device_get(reference), kljax.Policy(expected))


def test_reference_is_laid_out_like_the_policy(runs):
    config = config_of("{source: base}", "mesh.fsdp=4")
    with jax.set_mesh(tiny.mesh_of(1, 4, 1)):
        reference = load(config, runs[False])
    chex.assert_trees_all_equal(jax.device_get(reference.params), tiny.host_params())
    specs = {str(leaf.sharding.spec) for leaf in jax.tree.leaves(reference)}
    assert any("fsdp" in spec for spec in specs)


def test_missing_references_are_reported(runs, tmp_path):
    with pytest.raises(UserError, match=r"^reference\.step: got 2, .* there are: 0, 3$"):
        load(config_of("{source: step, step: 2}"), runs[False])
    with pytest.raises(UserError, match=rf"^reference\.path: no readable checkpoint at {tmp_path}"):
        load(config_of(f"{{source: checkpoint, path: {tmp_path}}}"), runs[False])
    path = runs[False] / "checkpoints" / "3"
    with pytest.raises(UserError, match=r"^reference\.path: .*trainable\.adapter\.\S+: got no such leaf"):
        load(config_of(f"{{source: adapter, path: {path}}}", lora=True), runs[True])
    path = runs[True] / "checkpoints" / "3"
    with pytest.raises(UserError, match=r"^reference\.path: .*trainable\.params\.\S+: got no such leaf"):
        load(config_of(f"{{source: checkpoint, path: {path}}}"), runs[False])
    with pytest.raises(UserError, match=r"^reference\.path: .* expected float32\[3, 16, 3\]"):
        load(config_of(f"{{source: adapter, path: {path}}}", "lora.rank=3", lora=True), runs[True])


@pytest.mark.parametrize(("saved", "there"), [([], "0"), ([3, 0], "0, 3")])
def test_step_without_a_checkpoint_is_refused_early(saved, there):
    def check(step: int) -> None:
        config = config_of(f"{{source: step, step: {step}}}")
        check_reference(Plan.of(config), tiny.model_of(config), tiny.mesh_of(), saved)

    with pytest.raises(UserError, match=rf"^reference\.step: got 2, .* no such checkpoint; there are: {there}$"):
        check(2)
    check(0)


def test_locate(tmp_path):
    (tmp_path / "7" / "state").mkdir(parents=True)
    (tmp_path / "plain").mkdir()
    assert locate(str(tmp_path / "7"), "params") == (tmp_path / "7" / "state", "trainable.params")
    assert locate(str(tmp_path / "7" / "state"), "adapter") == (tmp_path / "7" / "state", "trainable.adapter")
    assert locate(str(tmp_path / "plain"), "params") == (tmp_path / "plain", None)


def test_a_change_of_one_bit_is_found():
    policy = kljax.Policy(jax.tree.map(jax.numpy.asarray, tiny.host_params()), {"a": jax.numpy.ones(3)})
    reference = ScoredPolicy(tiny.model_of(tiny.config_of()), policy)
    before = reference_fingerprint(FrozenWeights(None, reference))
    assert_unchanged(FrozenWeights(None, reference), before)
    shared = ScoredPolicy(reference.model, kljax.Policy(None, policy.adapter))
    np.testing.assert_array_equal(reference_fingerprint(FrozenWeights(policy.params, shared)), before)
    leaves, tree = jax.tree.flatten(reference)
    for index in (0, len(leaves) - 1):
        flat = np.array(leaves[index]).reshape(-1)
        flat.view(np.uint32)[0] ^= 1
        changed = [*leaves[:index], flat.reshape(leaves[index].shape), *leaves[index + 1 :]]
        with pytest.raises(RuntimeError, match="the reference policy changed during the run"):
            assert_unchanged(FrozenWeights(None, jax.tree.unflatten(tree, changed)), before)


def test_missing_reference_cannot_change():
    frozen = FrozenWeights({"w": np.ones(2)}, None)
    assert reference_fingerprint(frozen) is None
    assert_unchanged(frozen, None)


def test_return_to_an_earlier_reference_is_an_entry_of_its_own(tmp_path):
    path = tmp_path / "references.json"
    first, second = (tiny.config_of(f"reference={{source: step, step: {step}}}") for step in (0, 1))
    for step, (config, word) in enumerate([(first, 1), (second, 2), (first, 3)]):
        record_reference(path, config, np.array([word], np.uint32), step)
        record_reference(path, config, np.array([word], np.uint32), step + 1)  # the run continues
    assert [entry.from_step for entry in read_entries(path)] == [0, 1, 2]
    with pytest.raises(UserError, match=r"reference\.step: got 0, whose weights are not .* since step 2 "):
        record_reference(path, first, np.array([1], np.uint32), 4)
