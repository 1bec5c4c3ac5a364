"""Loss, metrics, scores and gradients of the same batches in every layout: those of rows on their own, in float64."""

import dataclasses
import functools
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh

import kljax
from tests import tiny
from tests.train.sequences.layout_cases import (
    CASES,
    COMPLETION,
    PROMPT,
    ROWS,
    SAMPLES,
    batch_of,
    noise,
    with_kept_ids,
    with_routes,
)
from train.config.plan import Plan
from train.models import Decoder
from train.models.parameters import abstract_params
from train.models.sharding import batch_sharding
from train.rl.objective import coefficients
from train.rl.policy import ScoredPolicy
from train.rl.reference import reference_head
from train.rl.step import make_prepare, make_score, make_update
from train.run.setup import first_state
from train.sequences.batch import Batch
from train.sequences.forest import Forest
from train.sequences.packing import StepPacking, make_packer

LAYERS, EXPERTS, ACTIVE = 2, 5, 2
SIZES = (
    f"model.layers={LAYERS}",
    "model.heads=4",
    "model.kv_heads=2",
    f"data.max_prompt_length={PROMPT}",
    f"data.max_completion_length={COMPLETION}",
    f"rollout.prompts_per_step={ROWS // SAMPLES}",
    f"rollout.samples_per_prompt={SAMPLES}",
    # Old log-probs are scored, so that ratios differ from 1.
    "optim.epochs=2",
)
UNSHARED = "optim.share_prompts=false"
ALONE = (f"optim.micro_batches={ROWS}", UNSHARED)
PACKED = "optim.packing=true"
TREES = (PACKED, "optim.share_prefixes=true")
LAYOUTS: Mapping[str, tuple[str, ...]] = {"groups": (), "packed": (PACKED,), "trees": TREES}
KINDS: Mapping[str, tuple[str, ...]] = {
    "tokens": (
        "advantage.type=gae",
        "loss.value_coef=0.5",
        "loss.entropy_coef=0.05",
        "kl.reward={coef: 0.1, estimator: k3}",
        "kl.loss={coef: 0.3, estimator: exact}",
        "kl.rollout.coef=0.2",
        "reference.monitor=true",
        "correction=[{type: max_lag, max_lag: 4}, {type: veto_mask, min_ratio: 0.05}, "
        "{type: rejection_mask, lower: 0.4, upper: 2.5}, {type: truncated_importance_weights, max_weight: 1.1}]",
    ),
    "rows": (
        "loss.type=gspo",
        "loss.aggregation=seq_mean_token_mean",
        "kl.loss={coef: 0.3, gradient: value, importance_corrected: true, importance_level: sequence}",
        "correction=[{type: max_lag, max_lag: 4, level: token}, "
        "{type: importance_weights, level: sequence, mode: clip, lower: 0.2, upper: 5.0}]",
    ),
}
TERMS = ("kl.loss.coef=0.3", "kl.rollout.coef=0.2", "loss.entropy_coef=0.05")
SETTINGS: Mapping[str, tuple[str, ...]] = {
    "ratios of sequences": ("loss.level=sequence", "loss.aggregation=prompt_mean", "kl.reward.coef=0.1"),
    "ratios of geometric means": ("loss.level=geometric", "loss.aggregation=seq_mean_token_sum"),
    "gmpo": ("loss.type=gmpo", *TERMS),
    "m2po": ("loss.type=m2po", *TERMS),
    "clip_cov": ("loss.type=clip_cov", *TERMS),
    "one update": (*TERMS, "optim.epochs=1", "advantage={zeros: drop, scale_by_mean: true}"),
    "old log-probs of the sampler": (
        *TERMS,
        "loss={old_log_probs: sampler, aggregation: seq_mean_token_mean, empty_rows: count}",
        "kl.advantage.coef=0.1",
    ),
    "rejected tokens that count": (
        *TERMS,
        "loss.rejected_tokens=count",
        "correction=[{type: max_lag, max_lag: 4}, {type: off_policy_sequence_mask, max_kl: 0.01}, "
        "{type: importance_weights, upper: 1.1, normalize: tokens}]",
    ),
    "reductions of their own": (
        "kl.loss={coef: 0.3, aggregation: seq_mean_token_sum, estimator: k1, gradient: k2}",
        "loss={aggregation: token_mean, entropy_coef: 0.05, entropy_aggregation: seq_mean_token_mean}",
        "kl.reward={coef: 0.1, estimator: exact}",
        "reference.monitor=true",
    ),
    "lora": (*TERMS, "lora={rank: 2, alpha: 4.0, targets: [q_proj, v_proj, down_proj]}"),
    "kept tokens": (*TERMS, "rollout.top_k=5", "rollout.record_kept_tokens=true"),
    "experts": (
        *TERMS,
        f"model.experts={{count: {EXPERTS}, active: {ACTIVE}, width: 8}}",
        "routing={balance_coef: 0.7, z_coef: 0.3}",
    ),
}
GROUPS_OF_ONE = (
    *TERMS,
    "advantage.type=gae",
    "loss.value_coef=0.5",
    f"rollout.prompts_per_step={ROWS}",
    "rollout.samples_per_prompt=1",
)
RICH = (
    "branches at every depth",
    "branches at every depth, the shallowest first",
    "each completion continues the one before",
    "each completion stops before the one before",
    "empty completions between equal ones",
    "equal completions with different observations",
    "equal completions, each token trained in one",
    "two turns, the first shared",
    "rows of padding after the batch",
    "groups of unequal numbers of completions",
    "the sampler disagrees on all",
    "tokens get too old before they branch",
    "every row of the batch is the same",
    "equal sequences fill a row",
)
SMOOTH = ("loss.type=importance_sampling", "kl.loss={coef: 0.3, estimator: k2, gradient: value}", *TERMS[1:])
"""Terms that no clip makes jump where a rounding moves a log-prob."""
NARROW = "model.dtype=bfloat16"
TOLERANCE = 1e-11


class LayoutPrograms(NamedTuple):
    """The compiled functions of a step."""

    score: Any
    prepare: Any
    update: Any


class StepStart(NamedTuple):
    """What a step begins with.

    Attributes:
      first: the state whose weights score the batch.
      later: that of some updates later.
      base: the weights under an adapter; else None.
      reference: the reference.
    """

    first: Any
    later: Any
    base: Any
    reference: ScoredPolicy


class LayoutResult(NamedTuple):
    """What a layout computed, on the host: scored and prepared fields of trained tokens, metrics, and the gradient."""

    prepared: dict[str, np.ndarray]
    metrics: dict[str, np.ndarray]
    gradient: Any


Shape = tuple[int, int, int]
ONE: Shape = (1, 1, 1)


@functools.cache
def config_of(*options: str):
    return tiny.config_of(*SIZES, *options)


@functools.cache
def model_of(config) -> Decoder:
    """The tiny model with a sliding layer."""
    shape = tiny.model_of(config).config
    kinds = (dataclasses.replace(shape.pattern[0], attention=kind) for kind in ("sliding", "full"))
    return Decoder(dataclasses.replace(shape, sliding_window=3, pattern=tuple(kinds)))


def widened(options: tuple[str, ...], tree: Any) -> Any:
    """The tree in float64, unless the options say that the model computes in bfloat16."""
    return tree if NARROW in options else tiny.wide(tree)


@functools.cache
def start_of(options: tuple[str, ...], shape: Shape) -> StepStart:
    """What all layouts begin with: weights with opinions, and others some way off."""
    config, mesh = config_of(*options), tiny.mesh_of(*shape)
    model = model_of(config)
    with jax.set_mesh(mesh), jax.enable_x64(NARROW not in options):
        weights = jax.tree.map(np.asarray, tiny.filled(abstract_params(model, mesh), 0))
        placed = [tiny.placed(kljax.Policy(x), model, mesh) for x in (weights, tiny.moved(weights, 0.05))]
        policy, reference = (widened(options, x) for x in placed)
        first = first_state(Plan.of(config), model, mesh, tiny.copied(policy.params), tiny.keep_gradient())
        first = widened(options, first)
        moved = tiny.moved(first.trainable, 0.03, seed=2)
        later = dataclasses.replace(first, trainable=widened(options, moved))
        base = policy.params if config.lora else None
        return StepStart(first, later, base, ScoredPolicy(model, reference))


@functools.cache
def programs_of(options: tuple[str, ...], layout: tuple[str, ...], shape: Shape) -> LayoutPrograms:
    """The functions of a layout."""
    config, mesh = config_of(*options, *layout), tiny.mesh_of(*shape)
    plan, model, first = Plan.of(config), model_of(config), start_of(options, shape).first
    update = make_update(plan, model, tiny.keep_gradient(), first, mesh)
    return LayoutPrograms(make_score(plan, model, mesh), make_prepare(plan, mesh), update)


@functools.cache
def packer_of(config, mesh: Mesh):
    return make_packer(Plan.of(config), mesh)


def enlarged(forest: Forest, limit: int, *, fused: bool) -> Forest:
    """The forest with empty rows, branches and readers, up to one size for all cases.

    With one reader a slot a loss may be fused with the LM head, which then stays so.
    """
    micro_batches, rows, width, readers = forest.readers.shape
    slots, units, rows = np.arange(width), forest.units, rows // forest.units
    branches = forest.branches.shape[-1]
    assert rows <= limit
    assert branches <= ROWS
    assert readers <= ROWS

    def added(x: Any, fill: Any) -> np.ndarray:
        x = np.asarray(x)
        x = x.reshape(micro_batches, units, rows, *x.shape[2:])
        empty = np.broadcast_to(np.asarray(fill, x.dtype), (micro_batches, units, limit - rows, *x.shape[3:]))
        return np.concatenate([x, empty], axis=2).reshape(micro_batches, units * limit, *x.shape[3:])

    more = 0 if readers == 1 and fused else ROWS - readers
    wide = ((0, 0), (0, 0), (0, ROWS - branches))
    return dataclasses.replace(
        forest,
        readers=np.pad(added(forest.readers, -1), ((0, 0), (0, 0), (0, 0), (0, more)), constant_values=-1),
        depth=added(forest.depth, 0),
        end=added(forest.end, slots + 1),
        start=added(forest.start, slots),
        branches=np.pad(added(forest.branches, width), wide, constant_values=width),
        parents=np.pad(added(forest.parents, 0), wide),
        counts=added(forest.counts, 0),
    )


def run(
    options: tuple[str, ...],
    layout: tuple[str, ...],
    batch: Batch,
    *,
    shape: Shape = ONE,
    saves: bool | None = True,
    limit: int | None = 5,
) -> LayoutResult:
    """Scores, prepares and updates; packed rows are enlarged to `limit` rows on each device.

    Packed rows have to be used if they save slots by `saves`; None: they may be.
    """
    axes = tuple(f"mesh.{axis}={size}" for axis, size in zip(("data", "fsdp", "tensor"), shape, strict=True))
    layout = (*layout, *axes)
    # Packed rows and trees have one program.
    programs = programs_of(options, tuple(option for option in layout if "share_prefixes" not in option), shape)
    start, config, mesh = start_of(options, shape), config_of(*options, *layout), tiny.mesh_of(*shape)
    updates, packer = [np.arange(ROWS)], packer_of(config, mesh)
    with jax.set_mesh(mesh), jax.enable_x64(NARROW not in options):
        batch = jax.device_put(widened(options, batch), batch_sharding(mesh))
        places = StepPacking.off(updates) if packer is None else packer(batch, updates)
        ((rows, packed),) = places.updates
        assert saves is None or (packed is not None) == (packer is not None and saves)
        scoring = dict(places.score)
        if packed is not None and limit is not None:
            packed = enlarged(packed, limit, fused=True)
            if scoring:
                scoring["packed"] = enlarged(scoring["packed"], limit, fused=False)
        scored = programs.score(start.first.trainable, start.base, start.reference, batch, **scoring)
        if scored.old_log_probs is not None:
            scored = dataclasses.replace(scored, old_log_probs=scored.old_log_probs + noise(batch))
        prepared, _, measured = programs.prepare(scored, start.first.controllers)
        coefs = coefficients(config) | ({"key": jax.random.key(0)} if Plan.of(config).key else {})
        head = reference_head(Plan.of(config), start.reference)
        after, metrics = programs.update(
            tiny.copied(start.later), start.base, prepared, rows, coefs, ref_head=head, packed=packed
        )
        mask = np.asarray(batch.completion_mask)
        names = ("old_log_probs", "ref_log_probs", "ref_exact_kl", "values", "advantages", "returns", "kept_mask")
        fields = {name: getattr(prepared, name) for name in (*names, "correction_weights")}
        fields = {name: np.asarray(x)[mask] for name, x in fields.items() if x is not None}
        numbers = {name: metric.value() for name, metric in (measured | metrics).items()}
        return LayoutResult(fields, *jax.device_get((numbers, after.opt_state)))


def batch_for(options: tuple[str, ...], name: str, *, by_row: bool = False) -> Batch:
    """The batch of a case, with the fields that the options read."""
    batch, text = batch_of(CASES[name]), " ".join(options)
    if options is GROUPS_OF_ONE:
        rows = jnp.arange(ROWS, dtype=jnp.int32)
        return dataclasses.replace(batch, group_ids=jnp.where(batch.group_ids < 0, -1, rows))
    if "record_kept_tokens" in text:
        return with_kept_ids(batch, by_row=by_row)
    return with_routes(batch, LAYERS, EXPERTS, ACTIVE, by_row=by_row) if "experts" in text else batch


@functools.cache
def expected_of(options: tuple[str, ...], name: str, by_row: bool = False) -> LayoutResult:
    """The result of rows on their own, each a micro-batch, but for a loss that compares all tokens of an update."""
    layout = (UNSHARED,) if {"loss.type=clip_cov", "loss.type=m2po"} & set(options) else ALONE
    return run(options, layout, batch_for(options, name, by_row=by_row))


def compare(actual: LayoutResult, expected: LayoutResult) -> None:
    """Compares every number; a gradient relative to its norm."""
    for got, values in ((actual.prepared, expected.prepared), (actual.metrics, expected.metrics)):
        assert got.keys() == values.keys()
        for name, value in values.items():
            np.testing.assert_allclose(got[name], value, rtol=TOLERANCE, atol=TOLERANCE, err_msg=name)
    leaves = jax.tree_util.tree_leaves_with_path(expected.gradient)
    scale = float(np.sqrt(sum(np.square(x).sum() for _, x in leaves)))
    for (path, values), got in zip(leaves, jax.tree.leaves(actual.gradient), strict=True):
        assert values.dtype == np.float64
        np.testing.assert_allclose(got, values, rtol=0, atol=TOLERANCE * scale, err_msg=jax.tree_util.keystr(path))


def differences(
    options: tuple[str, ...], layout: tuple[str, ...], names: Iterable[str], *, by_row: bool = False, **how: Any
) -> dict[str, str]:
    """What differs from rows on their own, by the case; all cases go through one program."""
    found = {}
    for name in names:
        batch = batch_for(options, name, by_row=by_row)
        # What packed rows save depends on the rows that a device has in a micro-batch.
        saves = None if "shape" in how else CASES[name].saves
        try:
            compare(run(options, layout, batch, saves=saves, **how), expected_of(options, name, by_row))
        except AssertionError as error:
            found[name] = str(error)
    return found


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("kind", KINDS)
def test_layout_changes_no_number(kind, layout):
    assert differences(KINDS[kind], LAYOUTS[layout], CASES) == {}
    results = [expected_of(KINDS[kind], name) for name in CASES]
    assert all((x.metrics["grad_norm"] > 1e-3) == (x.prepared["old_log_probs"].size > 0) for x in results)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("setting", SETTINGS)
def test_layout_changes_no_number_of_a_setting(setting, layout):
    assert differences(SETTINGS[setting], LAYOUTS[layout], RICH) == {}


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("setting", ["kept tokens", "experts"])
def test_fields_may_differ_on_shared_tokens(setting, layout):
    assert differences(SETTINGS[setting], LAYOUTS[layout], RICH, by_row=True) == {}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_bfloat16_is_as_exact_as_in_rows_on_their_own(layout):
    """The distance of the gradients from those in float64 is not twice that of the rows, whose roundings are others."""

    def distance(of_layout: tuple[str, ...]) -> float:
        squares = []
        for name in RICH:
            exact, options = expected_of(SMOOTH, name).gradient, (*SMOOTH, NARROW)
            rounded = run(options, of_layout, batch_of(CASES[name])).gradient
            apart = jax.tree.map(lambda x, y: np.square(np.asarray(x, np.float64) - y).sum(), rounded, exact)
            squares.append(sum(jax.tree.leaves(apart)))
        return float(np.sqrt(sum(squares)))

    assert 0 < distance(LAYOUTS[layout]) < 2 * distance(ALONE)


def test_packing_changes_no_number_of_groups_of_one():
    """Groups have equal prompts, of which nothing is shared."""
    assert differences(GROUPS_OF_ONE, (PACKED,), RICH, limit=ROWS - 1) == {}


DEVICES: Mapping[str, tuple[tuple[str, ...], Shape, int | None]] = {
    "2 micro-batches of groups": (("optim.micro_batches=2",), ONE, None),
    "4 micro-batches of groups": (("optim.micro_batches=4",), ONE, None),
    "packed rows without shared prompts": ((PACKED, UNSHARED), ONE, None),
    "2 micro-batches of packed rows": ((PACKED, "optim.micro_batches=2"), ONE, None),
    "2 micro-batches of trees": ((*TREES, "optim.micro_batches=2"), ONE, None),
    "groups on 2 devices": ((), (2, 1, 1), None),
    "packed rows on 2 devices": ((PACKED,), (1, 2, 1), 2),
    "trees on 2 devices": (TREES, (2, 1, 1), 2),
    "groups of split heads": ((), (1, 1, 2), None),
    "trees of split heads": (TREES, (1, 1, 2), 5),
    "trees of split rows and heads": (TREES, (1, 2, 2), 2),
}


@pytest.mark.parametrize("devices", DEVICES)
@pytest.mark.parametrize("kind", KINDS)
def test_micro_batches_and_devices_change_no_number(kind, devices):
    layout, shape, limit = DEVICES[devices]
    # Without a limit every case has a program of its own.
    names = RICH if limit or PACKED not in layout else RICH[::5]
    assert differences(KINDS[kind], layout, names, shape=shape, limit=limit) == {}
