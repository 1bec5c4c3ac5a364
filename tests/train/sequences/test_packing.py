"""Packed rows: a place for every token, few programs, and the losses, gradients and scores of padded rows."""

import dataclasses
import functools
import math

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import kljax
from kljax.aggregation import MODES
from tests import rounding, tiny
from tests.train.sequences.forests import assert_is_forest
from train.config.plan import Plan
from train.models.sharding import batch_sharding
from train.rl.keys import purpose_key
from train.rl.objective import coefficients, make_objective
from train.rl.policy import ScoredPolicy
from train.rl.reference import reference_head
from train.rl.step import make_prepare, make_score, make_update, packed_size, update_rows
from train.rl.terms import make_weighting
from train.rl.tracing import traced_once
from train.sequences.batch import Batch
from train.sequences.forest import Forest
from train.sequences.packing import Cells, Lengths, StepPacking, choose_packing, make_packer, round_up
from train.sequences.token_fields import ROUTES, TOKEN_FIELDS

PROMPT, NEW_TOKENS = 5, 12
WIDTH = PROMPT + NEW_TOKENS
LONG = f"data.max_completion_length={NEW_TOKENS}"
TERMS = ("kl.loss.coef=0.3", "kl.rollout.coef=0.2", "loss.entropy_coef=0.05")
VALUE = ("advantage.type=gae", "loss.value_coef=0.5")


def config_of(*options: str):
    return tiny.config_of(LONG, *options)


def drawn_lengths(rng: np.random.Generator, rows: int = tiny.ROWS, group: int = tiny.SAMPLES) -> Lengths:
    """Long tails: most completions are short, some are empty, one has all columns."""
    completions = np.minimum(rng.geometric(0.25, rows) - 1, NEW_TOKENS)
    completions[rng.integers(rows)] = NEW_TOKENS
    prompts = rng.integers(1, PROMPT + 1, rows // group).repeat(group)
    return Lengths(prompts, completions, np.arange(rows) // group)


def rollout_batch(lengths: Lengths, seed: int = 0) -> Batch:
    """A batch of these lengths as a rollout leaves it."""
    rng, column = np.random.default_rng(seed), np.arange(WIDTH)
    completion_mask = (column >= PROMPT) & (column < PROMPT + lengths.completions[:, None])
    token_mask = ((column >= PROMPT - lengths.prompts[:, None]) & (column < PROMPT)) | completion_mask
    tokens = rng.integers(0, 256, completion_mask.shape)
    tokens[:, :PROMPT] = tokens[:: tiny.SAMPLES, :PROMPT].repeat(tiny.SAMPLES, axis=0)
    rows = len(tokens)
    log_probs = np.where(completion_mask, -5.6 + rng.normal(size=tokens.shape) / 4, 0)
    drawn = Batch(
        tokens=jnp.asarray(tokens, jnp.int32),
        token_mask=jnp.asarray(token_mask),
        completion_mask=jnp.asarray(completion_mask),
        rewards=jnp.asarray(rng.normal(size=rows), jnp.float32),
        group_ids=jnp.asarray(lengths.groups, jnp.int32),
        rollout_log_probs=jnp.asarray(log_probs, jnp.float32),
    )
    return tiny.from_column_0(drawn, PROMPT)


def full_batch(lengths: Lengths) -> Batch:
    """The same with every field of a prepared batch; fields hold 1e4 under the mask."""
    batch, rng = rollout_batch(lengths), np.random.default_rng(1)

    def field(center: float, spread: float) -> jax.Array:
        values = center + spread * rng.normal(size=batch.tokens.shape)
        return jnp.asarray(np.where(batch.completion_mask, values, 1e4), jnp.float32)

    return dataclasses.replace(
        batch,
        rollout_log_probs=field(-5.6, 0.1),
        old_log_probs=field(-5.6, 0.3),
        ref_log_probs=field(-5.6, 0.5),
        values=field(0.0, 1.0),
        advantages=field(0.0, 1.0),
        returns=field(0.0, 1.0),
    )


# ---- places ----


def cells_of(shards: int, rows: int, *, shared: bool = True, group: int = tiny.SAMPLES, width: int = WIDTH) -> Cells:
    return Cells(width, WIDTH, shards, rows // group * (PROMPT + group * NEW_TOKENS), shared, group)


def read_back(packing, lengths: Lengths, cells: Cells) -> list[int]:
    """Checks the slots of every sequence of every cell, and returns the rows that have some."""
    collected = []
    places = cells.positions(len(packing.rows), len(packing.packed.places), 1)
    cell_count, rows = places.shape[0] * places.shape[1], places.shape[2]
    readers = packing.packed.readers[..., 0].reshape(cell_count, -1)
    depths, slots_of = packing.packed.depth.reshape(cell_count, -1), packing.packed.places.reshape(cell_count, rows, -1)
    for cell, numbers in enumerate(packing.rows[places].reshape(cell_count, rows)):
        for row, number in enumerate(numbers):
            prompt, length = lengths.prompts[number], lengths.completions[number]
            columns = np.arange(prompt + length)
            slots = slots_of[cell, row, columns]
            if length == 0:
                assert (slots_of[cell, row] < 0).all()
                continue
            assert (slots_of[cell, row] >= 0).sum() == len(columns)
            assert len(set(slots // cells.width)) == 1, "a completion is in the packed row of its prompt"
            np.testing.assert_array_equal(depths[cell, slots], np.arange(len(slots)))
            np.testing.assert_array_equal(readers[cell, slots[prompt:]], row * WIDTH + columns[prompt:])
            sources, read = np.divmod(readers[cell, slots[:prompt]], WIDTH)
            assert (lengths.groups[numbers[sources]] == lengths.groups[number]).all()
            np.testing.assert_array_equal(read, columns[:prompt])
            collected.append(number)
        assert (readers[cell] >= 0).sum() == len(np.unique(slots_of[cell][slots_of[cell] >= 0]))
    return collected


@pytest.mark.parametrize("width", [WIDTH, 2 * WIDTH])
@pytest.mark.parametrize("shared", [True, False])
@pytest.mark.parametrize(("shards", "parts"), [(1, 1), (1, 4), (4, 2)])
def test_every_completion_is_packed_once_with_its_prompt(shared, shards, parts, width):
    rng, rows = np.random.default_rng(shards + 7 * parts), 64
    for _ in range(5):
        lengths = drawn_lengths(rng, rows, 4)
        cells = cells_of(shards, rows // (shards * parts), shared=shared, group=4, width=width)
        packing = choose_packing(cells, lengths, np.arange(rows), parts, 4, moves=True)
        actual = read_back(packing, lengths, cells)
        assert sorted(actual) == np.flatnonzero(lengths.completions).tolist()
        assert sorted(packing.rows) == list(range(rows))
        slots = packing.packed.depth.size
        assert slots < parts * shards * cells.padded
        assert packing.packed.depth.shape[1] // shards <= cells.limit
        filled = np.where(lengths.completions > 0, lengths.prompts, 0)
        real = lengths.completions.sum() + (filled.reshape(-1, 4).max(1) if shared else filled).sum()
        # First-fit decreasing leaves less than a third empty, beside the rounding of the number of rows.
        if shards * parts == 1:
            assert real <= slots <= 1.35 * real + 2 * width


def test_longer_rows_run_fewer_prompts():
    """A group of eight takes four rows, each with its prompt, or one long one."""
    lengths = Lengths(np.full(16, PROMPT), np.full(16, NEW_TOKENS // 2), np.arange(16) // 8)
    taken = []
    for width in (WIDTH, PROMPT + 8 * 6):
        packing = choose_packing(cells_of(1, 16, group=8, width=width), lengths, np.arange(16), 1, 8, moves=True)
        taken.append(int((packing.packed.readers[..., 0] >= 0).sum()))
    assert taken == [8 * (PROMPT + 2 * 6), 2 * (PROMPT + 8 * 6)]


def test_packed_completions_share_what_they_begin_with():
    """Of two tokens, so that many begin alike: fewer slots, and a forest still."""
    rng = np.random.default_rng(2)
    lengths = drawn_lengths(rng, 16, 8)
    tokens = rng.integers(0, 2, (16, WIDTH))
    cells = cells_of(1, 16, group=8)
    apart = choose_packing(cells, lengths, np.arange(16), 1, 8, moves=True)
    packing = choose_packing(cells, lengths._replace(tokens=tokens), np.arange(16), 1, 8, moves=True)
    forest = jax.tree.map(lambda x: x[0], packing.packed)
    rows = packing.rows
    column = np.arange(WIDTH)
    completed = lengths.completions[rows, None] > 0
    ends = lengths.prompts[rows, None] + lengths.completions[rows, None]
    mask = completed & (column < ends)
    assert_is_forest(forest, mask, None)
    assert (forest.places[~mask] < 0).all()
    taken = [int((packed.readers[..., 0] >= 0).sum()) for packed in (packing.packed, apart.packed)]
    assert taken[0] < 0.9 * taken[1]
    every = np.where(column < lengths.prompts[rows, None], -1, tokens[rows]).astype(np.int32)
    np.testing.assert_array_equal(forest.gather(forest.take(every), -1)[mask], every[mask])


@pytest.mark.parametrize("name", ["kept_ids", ROUTES])
def test_packed_completions_share_tokens_of_equal_fields_alone(name):
    """Log-probs depend on them: of two equal completions one has other values from its third token on."""
    lengths = Lengths(np.full(8, 2), np.array([4, 4, *[0] * 6]), np.arange(8) // 2)
    batch = rollout_batch(lengths)
    batch = dataclasses.replace(batch, tokens=batch.tokens[:: tiny.SAMPLES].repeat(tiny.SAMPLES, axis=0))
    values = np.ones((tiny.ROWS, WIDTH, *[2] * len(TOKEN_FIELDS[name].axes)), TOKEN_FIELDS[name].dtype)
    equal = placed(config_of(), dataclasses.replace(batch, fields={name: jnp.asarray(values)}), **TREES)
    values[1, 2 + 2] = 0
    other = placed(config_of(), dataclasses.replace(batch, fields={name: jnp.asarray(values)}), **TREES)
    assert [int((forest.readers[..., 0] >= 0).sum()) for forest in (equal, other)] == [2 + 4, 2 + 4 + 2]
    assert (other.places[0] == other.places[1])[: 2 + 4].tolist() == [True] * 4 + [False] * 2


def test_immovable_rows_stay_in_micro_batch_and_shard():
    lengths = drawn_lengths(np.random.default_rng(3), 32, 4)
    cells = cells_of(2, 4, group=4)
    packing = choose_packing(cells, lengths, np.arange(32), 4, 4, moves=False)
    np.testing.assert_array_equal(packing.rows, np.arange(32))
    assert len(packing.packed.depth) == 4


def test_rows_stay_padded_if_packing_saves_nothing():
    lengths = Lengths(np.full(8, PROMPT), np.full(8, NEW_TOKENS), np.arange(8) // 2)
    assert choose_packing(cells_of(1, 8), lengths, np.arange(8), 1, 2, moves=True) is None


def test_empty_completions_are_one_packed_row_without_a_token():
    """As of an update with the prompts that no completion came for."""
    lengths = Lengths(np.full(8, PROMPT), np.zeros(8, int), np.arange(8) // 2)
    packing = choose_packing(cells_of(1, 8), lengths, np.arange(8), 1, 2, moves=True)
    assert packing.packed.places.shape == (1, 8, WIDTH)
    assert packing.packed.depth.shape == (1, 1, WIDTH)
    assert (packing.packed.places < 0).all()
    assert (packing.packed.readers < 0).all()
    assert packing.share == 0


def test_there_are_few_numbers_of_packed_rows():
    """At most 8 between a number and its double, and an eighth more than needed at most."""
    sizes = {round_up(number) for number in range(1, 1025)}
    assert len(sizes) <= 8 * math.log2(1024)
    assert all(number <= round_up(number) <= math.ceil(number * 9 / 8) for number in range(1, 1025))


# ---- the objective ----

LENGTHS = Lengths(np.array([5, 5, 3, 3, 1, 1, 4, 4]), np.array([12, 1, 2, 4, 0, 3, 0, 0]), np.arange(8) // 2)
"""A group whose rows are both empty, an empty row beside another, and a row of all columns."""


@functools.cache
def gradient_of(options: tuple[str, ...]):
    """Config, and the compiled value, metrics and gradient of an objective: of padded rows, and of packed ones."""
    config = config_of(*options)
    objective = make_objective(Plan.of(config), tiny.model_of(config))
    return config, jax.jit(jax.value_and_grad(objective, has_aux=True))


def placed(config, batch: Batch, **changes) -> Forest:
    """The places of all rows in one cell."""
    optim = config.optim.model_copy(update={"packing": True, **changes})
    packer = make_packer(Plan.of(config.model_copy(update={"optim": optim})), tiny.mesh_of())
    ((_, packed),) = packer(batch, [np.arange(tiny.ROWS)]).updates
    return jax.tree.map(lambda x: x[0], packed)


# Whether rows share a prompt is nothing that a loss sees.
ALONE, SHARED, TREES = ({"share_prompts": False}, {"share_prompts": True}, {"share_prefixes": True})
LONG_ROWS = {**TREES, "packed_tokens": 3 * WIDTH}
CASES = [("ppo", (*TERMS, *VALUE), (SHARED, ALONE, TREES, LONG_ROWS)), ("gspo", ("loss.type=gspo",), (SHARED, TREES))]
SLOW = [
    ("gspo_alone", ("loss.type=gspo",), (ALONE,)),
    ("gmpo", ("loss.type=gmpo",), (SHARED, ALONE, TREES)),
    ("clip_cov", ("loss.type=clip_cov",), (SHARED, ALONE, TREES)),
    ("sequence", ("loss.level=sequence",), (SHARED, ALONE, TREES)),
]


@pytest.mark.parametrize("aggregation", MODES)
@pytest.mark.parametrize(
    ("options", "shares"),
    [*(pytest.param(*case, id=name) for name, *case in CASES),
     *(pytest.param(*case, id=name, marks=pytest.mark.thorough) for name, *case in SLOW)],
)  # fmt: skip
def test_loss_metrics_and_gradient_equal_padded_rows(options, shares, aggregation):
    """In float64; with a prompt whose completions are all empty, and one completion as long as a row."""
    with jax.enable_x64(True):
        config, run = gradient_of(options)
        length = (f"loss.max_length={NEW_TOKENS}",) if aggregation == "seq_mean_token_sum_norm" else ()
        reduced = config_of(*options, f"loss.aggregation={aggregation}", *length)
        batch = full_batch(LENGTHS)
        # The completions of a group begin alike.
        batch = dataclasses.replace(batch, tokens=batch.tokens[:: tiny.SAMPLES].repeat(tiny.SAMPLES, axis=0))
        batch = tiny.wide(make_weighting(Plan.of(reduced))(batch))
        state = tiny.wide(tiny.state_of(config, tiny.keep_gradient()).trainable)
        coefs = coefficients(config) | ({"key": jax.random.key(0)} if Plan.of(config).key else {})
        (loss, metrics), gradient = jax.device_get(run(state, None, batch, coefs))
        scale = np.sqrt(sum(np.square(x).sum() for x in jax.tree.leaves(gradient)))
        assert scale > 1e-3
        for share in shares:
            packed = placed(config, batch, **share)
            assert packed.depth.shape[0] < tiny.ROWS / 2
            assert (np.asarray(packed.counts) > 1).any() == (share != ALONE)
            assert (packed.readers.shape[-1] > 1) == ("share_prefixes" in share)
            assert packed.depth.shape[1] == share.get("packed_tokens", WIDTH)
            (packed_loss, packed_metrics), packed_gradient = run(state, None, batch, coefs, packed=packed)
            np.testing.assert_allclose(packed_loss, loss, rtol=1e-12)
            chex.assert_trees_all_close(packed_metrics, metrics, rtol=1e-12, atol=1e-12)
            chex.assert_trees_all_close(packed_gradient, gradient, rtol=0, atol=1e-12 * scale)


SHORT = LENGTHS._replace(completions=np.array([8, 1, 2, 4, 0, 3, 0, 0]))
NARROW = "data.max_tokens=13"
LAYOUTS = {"groups": (), "rows": ("optim.share_prompts=false",), "packed": ("optim.packing=true",)}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_rows_of_fewer_columns_have_the_same_loss(layout):
    """In float64; the longest row has all columns, fewer than a prompt and a completion may have together."""
    with jax.enable_x64(True):
        wide, narrow = ((*TERMS, *LAYOUTS[layout], *more) for more in ((), (NARROW,)))
        state = tiny.wide(tiny.state_of(config_of(*wide), tiny.keep_gradient()).trainable)
        results = []
        for options in (wide, narrow):
            config, run = gradient_of(options)
            batch = full_batch(SHORT)
            width = config.data.row_length()
            batch = jax.tree.map(lambda x, width=width: x[:, :width] if x.ndim > 1 else x, batch)
            batch = tiny.wide(make_weighting(Plan.of(config))(batch))
            packed = placed(config, batch) if layout == "packed" else None
            assert packed is None or packed.depth.shape[1] == width
            result = jax.device_get(run(state, None, batch, coefficients(config), packed=packed))
            results.append(jax.tree.map(lambda x: x[:, :13] if x.shape == (tiny.ROWS, WIDTH) else x, result))
        assert batch.tokens.shape[1] == 13 == int(batch.token_mask.sum(1).max())
        scale = np.sqrt(sum(np.square(x).sum() for x in jax.tree.leaves(results[0])))
        chex.assert_trees_all_close(*results, rtol=1e-11, atol=1e-12 * scale)


# ---- the step ----

# Twice the rows, so that each device has several in every micro-batch.
TWICE = ("rollout.prompts_per_step=8",)
TWICE_LENGTHS = Lengths(np.tile(LENGTHS.prompts, 2), np.tile(LENGTHS.completions, 2), np.arange(16) // 2)


@functools.cache
def start_of(options: tuple[str, ...], shape: tuple[int, int, int]):
    """The first state, the base under its adapter, and the preparation, which read no packing."""
    config, mesh = config_of(*options, *TWICE), tiny.mesh_of(*shape)
    first, base = tiny.state_of(config, tiny.keep_gradient(), mesh), None
    if config.lora is not None:
        # An adapter that starts at zero would hide errors.
        first.trainable["adapter"] = jax.tree.map(lambda x: x + 0.1, first.trainable["adapter"])
        base = tiny.placed(kljax.Policy(tiny.host_params()), tiny.model_of(config), mesh).params
    return first, base, make_prepare(Plan.of(config), mesh)


def step_of(options: tuple[str, ...], shape: tuple[int, int, int], *packing: str):
    """Scores, prepares and updates; returns the batch, the gradient and metrics of each update, and the packing."""
    config = config_of(*options, *TWICE, *packing)
    mesh, model = tiny.mesh_of(*shape), tiny.model_of(config)
    with jax.set_mesh(mesh):
        first, base, prepare = start_of(options, shape)
        reference = ScoredPolicy(model, kljax.Policy(tiny.moved(tiny.host_params(), 0.05)))
        ref_head = reference_head(Plan.of(config), reference)
        batch = jax.device_put(rollout_batch(TWICE_LENGTHS), batch_sharding(mesh))
        # A draw whose two updates need one number of packed rows, and so one program.
        updates = update_rows(config, purpose_key(6, "rows", 0))
        packer = make_packer(Plan.of(config), mesh)
        places = StepPacking.off(updates) if packer is None else packer(batch, updates)
        update = make_update(Plan.of(config), model, tiny.keep_gradient(), first, mesh)
        batch = make_score(Plan.of(config), model, mesh)(first.trainable, base, reference, batch, **places.score)
        prepared, _, _ = prepare(batch, first.controllers)
        collected = []
        for rows, packed in places.updates:
            state = tiny.copied(first)
            after, metrics = update(state, base, prepared, rows, coefficients(config), ref_head=ref_head, packed=packed)
            collected.append((after.opt_state, {name: metric.value() for name, metric in metrics.items()}))
    return *jax.device_get((prepared, collected)), places


LORA = "lora={rank: 2, alpha: 4.0, targets: [q_proj, v_proj, down_proj]}"
PARTS = ("optim.updates_per_batch=2", "optim.micro_batches=2")
EXACT = ("kl.loss={coef: 0.3, estimator: exact}", "reference.monitor=true", *TERMS[1:])
STEPS = [
    pytest.param((*EXACT, *VALUE, LORA, *PARTS), (2, 1, 2), None, id="mesh"),
    pytest.param((*TERMS, *VALUE, *PARTS), (1, 1, 1), 3 * WIDTH, id="parts", marks=pytest.mark.thorough),
    pytest.param((*TERMS, LORA, "loss.aggregation=prompt_mean"), (1, 4, 1), 2 * WIDTH, id="fsdp",
                 marks=pytest.mark.thorough),
]  # fmt: skip


# The longest sums are those of the MLP.
BOUND, GRADIENT_BOUND = (rounding.of_decoder(layers=tiny.LAYERS, longest_sum=24, passes=passes) for passes in (1, 3))


def assert_same(actual, expected, *, roundings: float, scale: float | None = None) -> None:
    """Compares by norm, and shows that the comparison would see an error of ten bounds in a single value."""
    rounding.assert_close_by_norm(actual, expected, roundings=roundings, scale=scale)
    wrong = rounding.planted(actual, roundings=10 * roundings, scale=scale)
    with pytest.raises(AssertionError, match="roundings of the norm"):
        rounding.assert_close_by_norm(wrong, expected, roundings=roundings, scale=scale)


@pytest.mark.parametrize(("options", "shape", "width"), STEPS)
def test_step_equals_the_step_of_padded_rows(options, shape, width):
    """Scores, and the gradient and metrics of each update; with rows that move between micro-batches and devices."""
    batch, updates, _ = step_of(options, shape)
    longer = () if width is None else (f"optim.packed_tokens={width}",)
    packed_batch, packed_updates, places = step_of(options, shape, "optim.packing=true", *longer)
    assert all(packed.depth.shape[-1] == (width or WIDTH) for _, packed in places.updates)
    assert places.score["packed"] is not None
    assert all(packed is not None for _, packed in places.updates)
    assert 0.5 < places.metrics["packed_share"] <= 1
    mask = batch.completion_mask
    for name in ("old_log_probs", "ref_log_probs", "values", "ref_hidden"):
        field, packed_field = getattr(batch, name), getattr(packed_batch, name)
        if name == "ref_hidden" and field is not None:
            before = np.roll(mask, -1, axis=1)
            field, packed_field = field[before], packed_field[before]
        if field is not None:
            # A value is a sum of products with hidden states, whose norm gives them the size 1.
            scale = math.sqrt(field.size) if name == "values" else rounding.norm(field)
            assert_same(packed_field, field, roundings=BOUND, scale=scale)
    for (gradient, metrics), (packed_gradient, packed_metrics) in zip(updates, packed_updates, strict=True):
        norm = float(metrics["grad_norm"])
        assert norm > 0.01
        assert_same(packed_gradient, gradient, roundings=GRADIENT_BOUND)
        chex.assert_trees_all_close(packed_metrics, metrics, rtol=2e-5, atol=5e-6)


def test_batches_of_many_lengths_need_few_programs():
    """The program is traced for a number of packed rows, or for padded rows, and never twice for one."""
    config = config_of("optim.packing=true", "optim.updates_per_batch=2", "optim.micro_batches=4",
                       "rollout={prompts_per_step: 32, samples_per_prompt: 4}")  # fmt: skip
    packer, rng = make_packer(Plan.of(config), tiny.mesh_of()), np.random.default_rng(0)
    updates, traced = [np.arange(64), np.arange(64, 128)], []

    @jax.jit
    @functools.partial(traced_once, size_of=lambda packed: packed_size(packed=packed))
    def program(packed):
        traced.append(packed_size(packed=packed))
        return packed

    for _ in range(30):
        completions = np.minimum(rng.geometric(rng.uniform(0.1, 0.9), 128) - 1, NEW_TOKENS)
        lengths = Lengths(np.full(128, PROMPT), completions, np.arange(128) // 4)
        places = packer(rollout_batch(lengths), updates)
        for _, packed in places.updates:
            program(packed)
    assert places.programs == {"update_programs": len(traced)}
    # From a quarter of the micro-batches to all of them, 8 sizes between a number of rows and its double.
    assert 3 < len(traced) <= 3 * 8
