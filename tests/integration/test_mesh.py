"""The same config on 8 virtual CPU devices in three mesh shapes: the losses and parameters of one device."""

import numpy as np
import pytest

from tests.integration.command import TINY, records, state_arrays

STEPS = 6
TOLERANCE = 2e-6  # relative, float32
RECIPE = (
    "configs/quickstart.yaml",
    *TINY,
    "seed=1",  # with it some completions are right at every step
    f"steps={STEPS}",
    "eval.greedy=false",
    f"checkpoint.every={STEPS}",
    "rollout.samples_per_prompt=4",
    # Returns of one sign: the loss of a group estimator is a sum of terms of both signs that cancel to almost 0, and a
    # relative error of that says nothing.
    "advantage={type: reinforce_plus_plus}",
    # AdamW divides a gradient by its own size: one that is zero up to rounding becomes a step of full size, in a
    # direction that rounding decides. An eps above the rounding of these gradients (1e-8 to 1e-7) keeps this out of the
    # comparison; at the default of 1e-8 the losses of some meshes agree to no better than 1.9e-6.
    "optim={learning_rate: 1.5e-3, optimizer: {type: adamw, eps: 1e-5}, updates_per_batch: 2, micro_batches: 2}",
)
ONE_DEVICE = (*RECIPE, "mesh={data: 1, fsdp: 1, tensor: 1}")
MESHES = ((2, 2, 2), *(pytest.param(mesh, marks=pytest.mark.thorough) for mesh in ((8, 1, 1), (1, 4, 2))))


def run_on(shared, data, fsdp, tensor):
    """The run on a mesh of this shape."""
    mesh = f"mesh={{data: {data}, fsdp: {fsdp}, tensor: {tensor}}}"
    return shared(*RECIPE, mesh).succeeded().root


def relative(got: np.ndarray, expected: np.ndarray) -> float:
    """Norm of the difference over the norm: of one leaf, so that a wrong small leaf does not hide behind a large one,
    but not of one number, since a weight near zero carries the rounding of its neighbours."""
    wide = got.astype(np.float64)
    return float(np.linalg.norm(wide - expected) / np.linalg.norm(expected.astype(np.float64)))


@pytest.fixture(scope="module")
def one_device(shared):
    return shared(*ONE_DEVICE).succeeded().root


@pytest.mark.parametrize("mesh", MESHES, ids=lambda mesh: "x".join(map(str, mesh)))
def test_mesh_gives_equal_numbers(shared, one_device, mesh):
    root = run_on(shared, *mesh)
    for phase, names in (("warm_start", ("loss",)), ("train", ("loss", "policy_loss", "entropy"))):
        got, expected = ([[r[name] for name in names] for r in records(item, phase)] for item in (root, one_device))
        np.testing.assert_allclose(got, expected, rtol=TOLERANCE, atol=0)
    train, expected_train = records(root, "train"), records(one_device, "train")
    # The same completions were sampled and judged: the keys belong to rows, not to devices.
    for name in ("reward", "completion_length", "finished"):
        assert [record[name] for record in train] == [record[name] for record in expected_train]
    # A KL is a difference of log-probs that are each rounded: exact to the rounding of those, whatever its own size.
    for name in ("kl_reference_exact", "rollout_kl"):
        differences = [first[name] - second[name] for first, second in zip(train, expected_train, strict=True)]
        assert max(map(abs, differences)) < 1e-6
    for step in (0, STEPS):
        state, expected = state_arrays(root, step), state_arrays(one_device, step)
        assert state.keys() == expected.keys()
        trained = [name for name in expected if name.startswith("trainable.")]
        assert trained
        far = {name: relative(state[name], expected[name]) for name in trained}
        assert {name: value for name, value in far.items() if value > TOLERANCE} == {}


def test_compared_policy_learns(one_device):
    """The steps move every leaf by far more than the tolerance, on rewards that are not all the same."""
    before, after = (state_arrays(one_device, step) for step in (0, STEPS))
    moved = {name: relative(after[name], before[name]) for name in before if name.startswith("trainable.")}
    assert min(moved.values()) > 1000 * TOLERANCE
    train = records(one_device, "train")
    assert all(0 < record["reward"] < 1 for record in train)
    assert all(record["grad_norm"] > 0.01 for record in train)
