"""Windows of KV cache: the tokens of one program, in memory and steps that follow the longest row."""

import functools
import itertools

import jax
import numpy as np
import pytest

import kljax
from tests import other_seeds, tiny
from train.models import Decoder, DecoderConfig, LayerKind, cache
from train.models.sharding import make_mesh
from train.process.interrupt import StepLeftError
from train.rollouts.sampler import Sampling, WindowedSampler, sample, stop_table, windows
from train.rollouts.sampler.windows import window_widths

# A sliding window shorter than the completions: columns out of order would show.
MODEL = Decoder(
    DecoderConfig(
        vocab_size=24, layers=2, width=16, heads=4, kv_heads=2, head_dim=4, mlp_width=24, sliding_window=5,
        pattern=(LayerKind("sliding"), LayerKind("full")), tie_embeddings=True,
    )
)  # fmt: skip
WIDTH, LIMIT, GROUP, PROMPTS = 6, 14, 4, 2
ROWS = GROUP * PROMPTS
WIDTHS = (4, 8, 16)
KEPT = Sampling(0.7, top_k=6, record_kept_tokens=True)
KEY = other_seeds.example_key(5)


@functools.cache
def policy_of(mesh=None) -> kljax.Policy:
    if mesh is not None:
        return tiny.placed(policy_of(), MODEL, mesh)
    # An example, whose rows have many lengths.
    params = tiny.drawn(MODEL, other_seeds.example_key(0))
    with jax.set_mesh(tiny.mesh_of()):
        params["embed_tokens"]["embedding"] *= 20
    return kljax.Policy(params)


def prompts_of() -> tuple[np.ndarray, np.ndarray]:
    mask = np.arange(WIDTH) >= np.array([[0], [3]])
    return np.where(mask, other_seeds.example(0).integers(0, 24, mask.shape), 0).astype(np.int32), mask


def sampler_of(mesh=None, **changes) -> WindowedSampler:
    options = {"name": "draw", "max_new_tokens": LIMIT, "sampling": KEPT, "eos_ids": (5,), "group": GROUP, **changes}
    return WindowedSampler(MODEL, mesh or make_mesh(), **{"widths": WIDTHS, **options})


LIMITS = np.array([14, 1, 3, 9, 14, 2, 5, 7])
STOP = stop_table(["aab"], [bytes((97 + token,)) for token in range(24)])


@functools.cache
def expected():
    draw = jax.jit(
        lambda policy, limits: sample(
            MODEL, policy, *prompts_of(), key=KEY, max_new_tokens=LIMIT, sampling=KEPT, eos_ids=(5,), stop=STOP,
            group=GROUP, limits=limits,
        )
    )  # fmt: skip
    return jax.tree.map(np.asarray, draw(policy_of(), LIMITS))


def check_same(got, want, *, steps: bool) -> None:
    for name in ("tokens", "token_mask", "completion_mask", "finished"):
        np.testing.assert_array_equal(getattr(got, name), getattr(want, name), err_msg=name)
    assert got.fields.keys() == {"rollout_log_probs", "log_kept_mass", "kept_ids"}
    for name, values in want.fields.items():
        atol = 0 if name == "kept_ids" else 3e-6
        np.testing.assert_allclose(got.fields[name], values, rtol=0, atol=atol, err_msg=name)
    if steps:
        assert (got.steps, got.occupancy) == (want.steps, want.occupancy)


def test_windows_double_from_the_minimum_to_the_limit():
    assert window_widths(2048) == [128, 256, 512, 1024, 2048]
    assert window_widths(256) == [128, 256]
    assert [window_widths(limit) for limit in (1, 100, 255)] == [[1], [100], [255]]
    for limit in range(1, 3000, 7):
        widths = window_widths(limit)
        assert limit <= widths[-1] < limit + 2 ** (len(widths) - 1)
        assert all(wide == 2 * narrow for narrow, wide in itertools.pairwise(widths))


REORDERED = np.random.default_rng(1).permutation(ROWS)
ONE_PROGRAM = [
    (3, True, False),
    (None, False, True),
    pytest.param(None, True, False, marks=pytest.mark.thorough),
    pytest.param(3, False, True, marks=pytest.mark.thorough),
]


@pytest.mark.parametrize(("slots", "unroll", "reorder"), ONE_PROGRAM)
def test_tokens_equal_the_tokens_of_one_program(slots, unroll, reorder):
    """With a slot for every row, and with fewer, whose columns have wrapped around when the window grows.

    If each row has a prompt of its own, rows may come in any order.
    """
    sampler = sampler_of(slots=slots, unroll=unroll, stop=STOP, group=1 if reorder else GROUP)
    # The second time nothing compiles: a program that is traced twice is an error.
    for order in (np.arange(ROWS), REORDERED if reorder else np.arange(ROWS)):
        prompts = [np.repeat(x, GROUP, axis=0)[order] for x in prompts_of()] if reorder else prompts_of()
        rows = {"limits": LIMITS[order], "row_ids": order}
        samples = sampler(policy_of(), *prompts, KEY, rows)
        full = jax.tree.map(lambda x, order=order: x[order] if np.ndim(x) else x, expected())
        check_same(samples, full, steps=slots is None)
    lengths = expected().completion_mask.sum(-1)
    assert len(set(lengths)) > 4, "rows of many lengths"
    assert lengths.max() > 8, "a row that needs the last window"


@pytest.mark.parametrize(("slots", "widths"), [(3, (16,)), (None, WIDTHS)])
def test_signal_ends_sampling_between_calls_of_few_steps(slots, widths, monkeypatch):
    """Calls of 4 steps draw the same tokens; a signal that comes in one of them ends the step before the next."""
    monkeypatch.setattr(windows, "STEPS", 4)
    asked = []
    monkeypatch.setattr(windows, "leave_if_stopping", lambda *, together: asked.append(together))
    sampler = sampler_of(slots=slots, widths=widths, stop=STOP)
    samples = sampler(policy_of(), *prompts_of(), KEY, {"limits": LIMITS})
    check_same(samples, expected(), steps=slots is None)
    assert len(asked) >= int(samples.steps) // 16
    assert all(asked)

    def leave(*, together):
        raise StepLeftError("left")

    monkeypatch.setattr(windows, "leave_if_stopping", leave)
    with pytest.raises(StepLeftError):
        sampler(policy_of(), *prompts_of(), KEY, {"limits": LIMITS})


@pytest.mark.parametrize("shape", [(2, 2, 2), pytest.param((8, 1, 1), marks=pytest.mark.thorough)])
def test_tokens_are_the_same_on_a_mesh(shape):
    mesh, single = make_mesh(*shape), expected()
    with jax.set_mesh(mesh):
        samples = sampler_of(mesh, stop=STOP, unroll=False)(policy_of(mesh), *prompts_of(), KEY, {"limits": LIMITS})
        check_same(samples, single, steps=True)


def test_only_needed_windows_are_compiled_and_allocated(monkeypatch):
    """No array of the programs, nor of the state between them, has more columns of cache than the longest row needs."""
    widths, sampler = [], sampler_of(max_new_tokens=64, widths=(4, 8, 16, 32, 64))
    double = cache.doubled
    monkeypatch.setattr(cache, "doubled", lambda slots: widths.append(2 * slots.columns) or double(slots))
    samples = sampler(policy_of(), *prompts_of(), KEY, {"limits": np.minimum(LIMITS, 7)})
    assert samples.tokens.shape == (ROWS, WIDTH + 64)
    # The caches of two layers, doubled once: 7 tokens fit in 8 columns.
    assert widths == [8] * 2


def test_first_window_memory_is_independent_of_the_limit():
    def memory_of(lowered: jax.stages.Lowered) -> int:
        analysis = lowered.compile({"xla_backend_optimization_level": 0}).memory_analysis()
        return analysis.temp_size_in_bytes + analysis.output_size_in_bytes

    def first_window(limit: int) -> int:
        widths = [width for width in (32, 64, 128, 256, 512, 1024) if width <= limit]
        sampler = sampler_of(max_new_tokens=limit, widths=widths, unroll=False)
        return memory_of(sampler.first.lower(policy_of(), *prompts_of(), KEY, {}))

    config, columns = MODEL.config, 1024 - 64
    cache = 2 * 4 * ROWS * columns * config.layers * config.kv_heads * config.head_dim
    # The limit adds records of the draws alone: ids and log-probs of 4 bytes, kept as they are and on their way.
    records = 2 * 4 * ROWS * columns * (3 + KEPT.top_k)
    assert first_window(1024) - first_window(64) <= records
    # The one program for all lengths has the widest cache from its start.
    samplers = [sampler_of(max_new_tokens=limit, unroll=False) for limit in (64, 1024)]
    full = [memory_of(sampler.lower(policy_of(), *prompts_of(), KEY)) for sampler in samplers]
    assert full[1] - full[0] >= cache
