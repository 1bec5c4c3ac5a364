"""A declared per-token field: filled by the sampler, recorded and read back, equal in the update in every layout."""

import dataclasses
import json
from collections.abc import Iterator
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests import tiny
from train.config.errors import UserError
from train.config.plan import Layout, Plan
from train.distributed.global_arrays import RowSplit
from train.models.sharding import make_mesh
from train.rl import step
from train.rl.keys import purpose_key
from train.rl.objective import coefficients
from train.rl.policy import Sequences
from train.rl.state import policy_of
from train.rl.step import make_prepare, make_score, make_update, update_rows
from train.rollouts.collect import Rollout, collect
from train.rollouts.open import open_source, open_stream
from train.rollouts.recorded import record_rows, write_rows
from train.rollouts.sampler import draw, engine, windows
from train.rollouts.source import Request, SourceError
from train.sequences.packing import StepPacking, make_packer
from train.sequences.token_fields import TOKEN_FIELDS, VERSIONS, TokenField

NAME, FILL = "choices", -1
OPTIONS = ("rollout.samples_per_prompt=4", "optim.updates_per_batch=2", "kl.loss.coef=0")
ROWS = 16


def choices_of(tokens, mask):
    """Computes values [..., 2, 3] from token ids, so that each value names its token."""
    values = 7 * tokens[..., None, None] + np.arange(6, dtype=np.int32).reshape(2, 3)
    return jnp.where(mask[..., None, None], values, FILL).astype(jnp.int32)


def declare(monkeypatch: pytest.MonkeyPatch) -> None:
    """Declares the field, and fills it where the sampler draws tokens and where it prefills prompts."""
    monkeypatch.setitem(TOKEN_FIELDS, NAME, TokenField(np.int32, axes=("layers", "choices"), fill=FILL, prompts=True))
    real_draw, real_start = draw.draw, engine.start

    def drawing(*arguments, **options):
        draws = real_draw(*arguments, **options)
        return {**draws, NAME: choices_of(draws["tokens"], draws["tokens"] >= 0)}

    def starting(model, policy, prompts, prompt_mask, **options):
        state = real_start(model, policy, prompts, prompt_mask, **options)
        queue = dataclasses.replace(state.queue, fields={NAME: choices_of(prompts, prompts >= 0)})
        return dataclasses.replace(state, queue=queue)

    monkeypatch.setattr(draw, "draw", drawing)
    monkeypatch.setattr(engine, "draw", drawing)
    for module in (engine, windows):
        monkeypatch.setattr(module, "start", starting)


@pytest.fixture(scope="module")
def recording(tmp_path_factory) -> Iterator[tuple[Path, Rollout]]:
    """Samples and records a step with fewer slots than rows; the field stays declared."""
    path = tmp_path_factory.mktemp("recording")
    sampling = ("rollout.slots=3", "rollout.top_k=5", "rollout.record_kept_tokens=true")
    config = tiny.config_of(*OPTIONS, *sampling, f"rollout.record={path}")
    with pytest.MonkeyPatch.context() as monkeypatch:
        declare(monkeypatch)
        context = tiny.context_of(config)
        stream = tiny.stream_of(context)
        stream.update(policy_of(tiny.state_of(config, tiny.keep_gradient()).trainable, None), 0)
        yield path, collect(context, stream, 0)


def context_of(path, *options: str, mesh=None):
    source = f"rollout.source={{type: file, path: {path}, shuffle: false}}"
    return tiny.context_of(tiny.config_of(*OPTIONS, source, *options), mesh=mesh or tiny.mesh_of())


def check_values(batch) -> None:
    assert batch.fields[NAME].dtype == np.int32
    np.testing.assert_array_equal(batch.fields[NAME], choices_of(batch.tokens, batch.token_mask))


def test_sampled_field_has_the_values_of_its_tokens(recording):
    _, rollout = recording
    check_values(rollout.batch)
    assert rollout.batch.fields.keys() == {NAME, "kept_ids"}


def test_recorded_field_is_read_back(recording):
    path, rollout = recording
    context = context_of(path)
    batch = collect(context, open_stream(context), 0).batch
    check_values(batch)
    mask = np.asarray(batch.token_mask)
    np.testing.assert_array_equal(batch.fields[NAME], rollout.batch.fields[NAME])
    np.testing.assert_array_equal(batch.tokens[mask], rollout.batch.tokens[mask])
    (first, *_) = (path / "00000000.jsonl").read_text().splitlines()
    row = json.loads(first)
    assert list(row)[-5:] == ["kept_ids", VERSIONS, NAME, "kljax_format", "kljax_check"]
    assert np.shape(row[NAME]) == (len(row["prompt_ids"]) + len(row["completion_ids"]), 2, 3)


PADDED = "optim.share_prompts=false"
LAYOUTS = {
    "padded": ((PADDED,), {}),
    "micro-batches": ((PADDED, "optim.micro_batches=4"), {"data": 2}),
    "shared prompts": (("optim.micro_batches=2",), {}),
    "packed": (("optim.packing=true", "data.max_completion_length=12", "optim.micro_batches=2"), {"fsdp": 2}),
    # Rows of 6 + 4 tokens, which two devices split.
    "context shards": ((PADDED, "data.max_prompt_length=6"), {"fsdp": 2, "context": 2, "tensor": 2}),
}
HEADS = ("model.heads=4", "model.kv_heads=2")


def counting(config, objective):
    """Adds to the parts of an objective how many values of its micro-batch differ from the values of their tokens."""

    def counted(trainable, base, batch, coefs, ref_head=None, *, packed=None, totals=None):
        loss, metrics = objective(trainable, base, batch, coefs, ref_head, packed=packed, totals=totals)
        values, expected = batch.fields[NAME], choices_of(batch.tokens, batch.token_mask)
        forest = Sequences.of(batch, Layout.of(config), packed).forest
        tokens, mask = forest.take(batch.tokens), forest.take(batch.token_mask)
        pairs = (values, expected), (forest.take(values, FILL), choices_of(tokens, mask))
        wrong = sum(jnp.sum(first != other) for first, other in pairs)
        counts = {"wrong": wrong, "filled": jnp.sum(values != FILL)}
        return loss, metrics._replace(parts=metrics.parts | {name: 1.0 * x for name, x in counts.items()})

    return counted


# Micro-batches are of padded rows as well.
@pytest.mark.parametrize("name", [pytest.param("padded", marks=pytest.mark.thorough), *list(LAYOUTS)[1:]])
def test_field_in_an_update_is_equal_everywhere(name, recording, monkeypatch):
    options, shape = LAYOUTS[name]
    mesh, make_objective = make_mesh(**shape), step.make_objective
    axes = (f"mesh.{axis}={size}" for axis, size in shape.items())
    context = context_of(recording[0], *HEADS, *options, *axes, mesh=mesh)
    config, model = context.config, context.model
    monkeypatch.setattr(step, "make_objective", lambda *both: counting(config, make_objective(*both)))
    with jax.set_mesh(mesh):
        params = tiny.placed(policy_of({"params": tiny.drawn(model, jax.random.key(0))}, None), model, mesh).params
        state = tiny.first_state(Plan.of(config), model, mesh, params, tiny.keep_gradient())
        batch = collect(context, open_stream(context), 0).batch
        check_values(batch)
        updates, packer = update_rows(config, purpose_key(0, "rows", 0)), make_packer(Plan.of(config), mesh)
        packing = StepPacking.off(updates) if packer is None else packer(batch, updates)
        batch = make_score(Plan.of(config), model, mesh)(state.trainable, None, None, batch, **packing.score)
        batch, _, _ = make_prepare(Plan.of(config), mesh)(batch, state.controllers)
        update, filled = make_update(Plan.of(config), model, tiny.keep_gradient(), state, mesh), 0
        for rows, packed in packing.updates:
            _, metrics = update(tiny.copied(state), None, batch, rows, coefficients(config), packed=packed)
            assert metrics["wrong"].value() == 0
            filled += metrics["filled"].value()
    assert filled == 6 * batch.token_mask.sum()


def test_rows_of_a_process_have_their_field(recording):
    """A process that holds rows 2 to 9 and judges two of them."""
    context = context_of(recording[0])
    source, request = open_source(context), Request.of(context, 0)
    full, rows = source.sample(request), RowSplit(ROWS, np.arange(2, 10), np.array([3, 8]))
    part = source.sample(dataclasses.replace(request, rows=rows))
    np.testing.assert_array_equal(part.fields[NAME], full.fields[NAME][2:10])
    recorded, part_rows = (
        record_rows(completions, split, 4, context.config.data.max_prompt_length)
        for completions, split in ((full, request.rows), (part, rows))
    )
    assert len(recorded) == ROWS
    assert part_rows == [recorded[3], recorded[8]]


def rows_of(path: Path) -> list[dict]:
    rows = [json.loads(line) for line in (path / "00000000.jsonl").read_text().splitlines()]
    return [{name: value for name, value in row.items() if name != "kljax_check"} for row in rows]


def test_recording_without_the_field_is_still_read(recording, tmp_path):
    rows = [{name: value for name, value in row.items() if name != NAME} for row in rows_of(recording[0])]
    write_rows(tmp_path, 0, rows)
    context = context_of(tmp_path)
    batch = collect(context, open_stream(context), 0).batch
    assert batch.fields.keys() == {"kept_ids"}
    np.testing.assert_array_equal(batch.fields["kept_ids"], recording[1].batch.fields["kept_ids"])


BAD = {
    "got 1 lists, expected": lambda values: values[:1],
    "got [[[0.5, 0.5, 0.5]": lambda values: [[[0.5] * 3] * 2] * len(values),
    "got [[[1, 2]], ": lambda values: [[[1, 2]], *values[1:]],
    "got values of [1, 3], but the rows before have [2, 3]": lambda values: [value[:1] for value in values],
    "missing, but not in the rows before": lambda values: None,
}


@pytest.mark.parametrize("message", BAD)
def test_wrong_values_of_a_recorded_field_are_named(message, recording, tmp_path):
    rows = rows_of(recording[0])
    rows[1][NAME] = BAD[message](rows[1][NAME])
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    with pytest.raises(UserError) as caught:
        open_source(context_of(path))
    assert str(caught.value).startswith(f"rollout.source.path: {path}, line 2: {NAME}: {message}")


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        (
            {"unknown": np.zeros((ROWS, tiny.LENGTH))},
            "got the field 'unknown', expected one of rollout_log_probs, kept_ids",
        ),
        (
            {"log_probs": np.zeros((ROWS, tiny.LENGTH))},
            "got the field 'log_probs', .*; did you mean 'rollout_log_probs'",
        ),
        ({NAME: np.zeros((ROWS, tiny.LENGTH, 2))}, r"choices: got \(16, 9, 2\), expected \(16, 9, 'layers', 'cho"),
    ],
)
def test_fields_of_another_form_are_refused(fields, message, recording):
    context = context_of(recording[0])
    completions = open_source(context).sample(Request.of(context, 0))
    with pytest.raises(SourceError, match=message):
        tiny.rollout_of(context, dataclasses.replace(completions, fields=fields))
