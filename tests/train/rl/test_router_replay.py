"""Router replay: recorded by the sampler and in files, used in scoring and in every update, and by no reference.

Traps, and the test of each, here unless a file is named:

1. The last token has no route, and an answer may leave out the first ones: `test_sampler_records_...`,
   `test_omitted_...` and `test_documented_...` in `test_server_routes.py`.
2. Wire forms: `test_dtype_and_layers_...` and `test_damaged_routes_...` there.
3. Dense layers, and layers after the last: the same two.
4. Shared prompts: `test_wrong_routes_...` (prompt), `test_shared_and_packed_rows_...` in `test_experts.py`.
5. Padding: `test_padding_reaches_no_expert` there, `test_router_losses.py`.
6. Gates of the trainer, duplicates: `test_replayed_gates_...`, `test_replayed_routes_...` in `test_experts.py`.
7. The reference chooses for itself: `test_other_routes_...`.
8. Micro-batches, context shards, resume: `test_update_uses_...`, `test_batch_ahead_...` in `test_server_routes.py`.
9. Routes of older weights are valid: `test_old_policy_routes_...`.
10. A refilled slot: `test_sampler_records_...`, with fewer slots than rows.
"""

import dataclasses
import json
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh

import kljax
from tests import tiny
from train.config.errors import GuardError, UserError
from train.config.plan import Plan
from train.models import Decoder
from train.models.experts import Routed
from train.models.sharding import make_mesh
from train.rl import objective as objectives
from train.rl.keys import purpose_key
from train.rl.policy import ScoredPolicy, Sequences, hidden_states
from train.rl.routing import routing_metrics
from train.rl.state import TrainState, policy_of
from train.rl.step import make_prepare, make_score, make_update, update_rows
from train.rollouts.collect import Rollout, collect
from train.rollouts.open import open_source, open_stream
from train.rollouts.source import Request, SourceError
from train.run.routes import verify_routes
from train.sequences.packing import StepPacking, make_packer
from train.sequences.token_fields import ROUTES
from train.weights.model import make_policy_model

COUNT, ACTIVE = 6, 2
EXPERTS = f"model.experts={{count: {COUNT}, active: {ACTIVE}, width: 8}}"
OPTIONS = (EXPERTS, "rollout.samples_per_prompt=4", "optim.updates_per_batch=2", "kl.loss.coef=0.1")
SHAPE = (tiny.LAYERS, ACTIVE)


@pytest.fixture(scope="module")
def recording(tmp_path_factory) -> tuple[Path, Rollout]:
    """Samples and records a step with fewer slots than rows."""
    path = tmp_path_factory.mktemp("recording")
    config = tiny.config_of(*OPTIONS, "rollout.slots=3", f"rollout.record={path}")
    context = tiny.context_of(config)
    stream = tiny.stream_of(context)
    stream.update(kljax.Policy(weights(context.model)), 0)
    return path, collect(context, stream, 0)


def weights(model: Decoder) -> dict:
    """Large enough for opinions."""
    return jax.tree.map(lambda x: np.asarray(x) * (2 if x.ndim > 2 else 1), tiny.drawn(model, jax.random.key(0)))


def state_of(plan: Plan, model: Decoder, mesh: Mesh) -> TrainState:
    params = tiny.placed(kljax.Policy(weights(model)), model, mesh).params
    return tiny.first_state(plan, model, mesh, params, tiny.keep_gradient())


def context_of(path, *options: str, mesh=None):
    source = f"rollout.source={{type: file, path: {path}, shuffle: false}}"
    return tiny.context_of(tiny.config_of(*OPTIONS, source, *options), mesh=mesh or tiny.mesh_of())


def fed_tokens(mask) -> np.ndarray:
    """All real tokens but the last of each row."""
    mask = np.asarray(mask)
    return mask & (np.cumsum(mask, 1) < mask.sum(1, keepdims=True))


def other_experts(routes, mask) -> np.ndarray:
    """Routes that no router has chosen: those of the next experts."""
    routes = np.asarray(routes)
    return np.where(fed_tokens(mask)[..., None, None], np.sort((routes + 1) % COUNT, -1), -1).astype(np.int16)


def test_sampler_records_the_experts_of_every_computed_token(recording):
    """In prompts and completions, also of rows that shared a slot; the last token of a row is never computed."""
    batch = recording[1].batch
    routes = np.asarray(batch.fields[ROUTES])
    assert routes.dtype == np.int16
    assert routes.shape == (*batch.tokens.shape, *SHAPE)
    np.testing.assert_array_equal((routes >= 0).all((2, 3)), fed_tokens(batch.token_mask))
    context = tiny.context_of(tiny.config_of(*OPTIONS))
    params = weights(context.model)
    _, routed = jax.jit(lambda: context.model.bind(params).routed(batch.tokens, batch.token_mask))()
    fed = fed_tokens(batch.token_mask)
    np.testing.assert_array_equal(np.sort(routes, -1)[fed], np.asarray(routed.chosen)[fed])


def test_recorded_routes_are_read_back(recording):
    path, rollout = recording
    context = context_of(path)
    batch = collect(context, open_stream(context), 0).batch
    np.testing.assert_array_equal(batch.fields[ROUTES], rollout.batch.fields[ROUTES])


def test_other_routes_change_policy_but_no_reference(recording):
    context = context_of(recording[0])
    plan = Plan.of(context.config)
    batch = collect(context, open_stream(context), 0).batch
    state = state_of(plan, context.model, context.mesh)
    reference = ScoredPolicy(context.model, policy_of(state.trainable, None))
    score = make_score(plan, context.model, context.mesh)
    recorded = batch.fields[ROUTES]
    routes = jax.device_put(other_experts(recorded, batch.token_mask), recorded.sharding)
    changed = dataclasses.replace(batch, fields={**batch.fields, ROUTES: routes})
    first, second = (score(state.trainable, None, reference, rows) for rows in (batch, changed))
    mask = np.asarray(batch.completion_mask)
    np.testing.assert_allclose(first.old_log_probs[mask], first.ref_log_probs[mask], atol=2e-6)
    np.testing.assert_array_equal(second.ref_log_probs, first.ref_log_probs)
    # A token's own routes decide the next: all differ but where rounding hides it.
    assert (np.abs(second.old_log_probs - first.old_log_probs)[mask] > 1e-5).mean() > 0.9
    off = tiny.config_of(*OPTIONS, "routing.replay=none")
    ignoring = make_score(Plan.of(off), context.model, context.mesh)(state.trainable, None, reference, changed)
    np.testing.assert_array_equal(ignoring.old_log_probs, first.old_log_probs)


@pytest.mark.parametrize("shared", ["false", "true"])
def test_old_policy_routes_come_from_the_scoring_pass(recording, shared):
    """Neither those of the sampler nor those of the moved policy: the update reports the flips, and loses none."""
    options = ("routing.replay=old_policy", "kl.loss.coef=0", f"optim.share_prompts={shared}")
    context = context_of(recording[0], *options)
    plan, model, mesh = Plan.of(context.config), context.model, context.mesh
    state = state_of(plan, model, mesh)
    batch = collect(context, open_stream(context), 0).batch
    turned = other_experts(batch.fields[ROUTES], batch.token_mask)
    batch = dataclasses.replace(batch, fields={**batch.fields, ROUTES: jax.device_put(turned)})
    batch = make_score(plan, model, mesh)(state.trainable, None, None, batch)
    policy = policy_of(state.trainable, None)
    _, routed = jax.jit(lambda: model.bind(policy.params).routed(batch.tokens, batch.token_mask))()
    np.testing.assert_array_equal(batch.fields[ROUTES], routed.chosen)
    batch, _, _ = make_prepare(plan, mesh)(batch, state.controllers)
    moved = dataclasses.replace(state, trainable={"params": tiny.moved(state.trainable["params"], 0.3)})
    update = make_update(plan, model, tiny.keep_gradient(), moved, mesh)
    _, metrics = update(moved, None, batch, np.arange(len(batch.tokens)), objectives.coefficients(context.config))
    assert float(metrics["routing_lost"].value()) == 0
    assert float(metrics["routing_flips"].value()) > 0.05


def test_old_policy_routes_need_a_scoring_pass():
    with pytest.raises(UserError, match=r"routing\.replay: got old_policy, but no pass scores the policy"):
        tiny.config_of(*OPTIONS, "routing.replay=old_policy", "optim.updates_per_batch=1")


PADDED = "optim.share_prompts=false"
LAYOUTS = {
    "padded": ((PADDED,), {}),
    "micro-batches": ((PADDED, "optim.micro_batches=4"), {"data": 2}),
    "shared prompts": (("optim.micro_batches=2",), {}),
    "packed": (("optim.packing=true", "data.max_completion_length=12", "optim.micro_batches=2"), {"fsdp": 2}),
    "context shards": ((PADDED, "data.max_prompt_length=6"), {"context": 2, "tensor": 2}),
    "all together": (
        (PADDED, "optim.micro_batches=2", "data.max_prompt_length=6"),
        {"data": 2, "expert": 2, "context": 2},
    ),
}
QUICK = ("shared prompts", "packed", "all together")


@pytest.mark.parametrize(
    "name", [name if name in QUICK else pytest.param(name, marks=pytest.mark.thorough) for name in LAYOUTS]
)
def test_update_uses_recorded_routes_in_every_layout(name, recording):
    """Equality is measured in the update itself: no route is lost, and all that were turned count as flips."""
    options, shape = LAYOUTS[name]
    mesh = make_mesh(**shape)
    axes = (f"mesh.{axis}={size}" for axis, size in shape.items())
    heads = ("model.heads=4", "model.kv_heads=2", "kl.loss.coef=0")
    context = context_of(recording[0], *heads, *options, *axes, mesh=mesh)
    plan, model = Plan.of(context.config), context.model
    with jax.set_mesh(mesh):
        state = state_of(plan, model, mesh)
        batch = collect(context, open_stream(context), 0).batch
        routes = other_experts(batch.fields[ROUTES], batch.token_mask)
        routes = jax.device_put(routes, batch.fields[ROUTES].sharding)
        batch = dataclasses.replace(batch, fields={**batch.fields, ROUTES: routes})
        updates, packer = update_rows(context.config, purpose_key(0, "rows", 0)), make_packer(plan, mesh)
        packing = StepPacking.off(updates) if packer is None else packer(batch, updates)
        batch = make_score(plan, model, mesh)(state.trainable, None, None, batch, **packing.score)
        batch, _, _ = make_prepare(plan, mesh)(batch, state.controllers)
        update = make_update(plan, model, tiny.keep_gradient(), state, mesh)
        rows, packed = packing.updates[0]
        coefs = objectives.coefficients(context.config)
        _, metrics = update(tiny.copied(state), None, batch, rows, coefs, packed=packed)
    values = {name: float(metric.value()) for name, metric in metrics.items() if name.startswith("rout")}
    assert values["routing_lost"] == 0
    assert values["routing_flips"] > 0.5
    assert {f"routing_flips_layer_{layer}" for layer in range(tiny.LAYERS)} < values.keys()
    # The last tokens of the rows.
    assert 0 < values["routing_missing"] < 0.3
    assert 0 < values["router_entropy"] <= np.log(COUNT) + 1e-6


def test_replayed_gates_have_a_gradient_to_the_router(recording):
    context, batch = tiny.context_of(tiny.config_of(*OPTIONS)), recording[1].batch
    params = weights(context.model)
    routes = jnp.asarray(other_experts(batch.fields[ROUTES], batch.token_mask))
    sequences = Sequences.rows(batch.tokens, batch.token_mask, fields={ROUTES: routes})

    def loss(params: dict) -> jax.Array:
        hidden = hidden_states(ScoredPolicy(context.model, kljax.Policy(params)), sequences)
        return jnp.where(batch.token_mask, hidden[..., 0], 0).sum()

    slopes = jax.jit(jax.grad(loss))(params)["layers"]["mlp"]["gate"]["kernel"]
    assert (jnp.abs(slopes).max((1, 2)) > 1e-4).all()


@pytest.fixture(scope="module")
def routed(recording):
    """The choices of the recorded policy with its recorded routes."""
    model, batch = tiny.model_of(tiny.config_of(*OPTIONS)), recording[1].batch
    params = weights(model)
    run = jax.jit(lambda routes: model.bind(params).routed(batch.tokens, batch.token_mask, routes=routes)[1])
    return model, run


def verified(model: Decoder, routed: Routed, recorded: np.ndarray) -> None:
    counts = (routed.routes[..., 0, 0] >= 0).astype(jnp.int32)
    metrics = routing_metrics(model.config, routed, counts, jnp.asarray(recorded), verify=True)
    verify_routes({name: float(metric.value()) for name, metric in metrics.items()}, step=7)


def agreement(own: float, before: float, after: float, tokens: int) -> dict[str, float]:
    names = ("", "_before", "_after")
    shares = {f"routing_agreement{name}": x for name, x in zip(names, (own, before, after), strict=True)}
    return shares | {"routing_missing": 0.1, "routing_compared": tokens}


@pytest.mark.parametrize(
    "values",
    [
        agreement(0.562, 0.571, 0.5, 56),
        agreement(0.562, 0.6, 0.5, 2000),
        agreement(0.0, 0.6, 0.6, 4),
        agreement(0.3, 0.05, 0.1, 400),
        agreement(1.0, 1.0, 1.0, 1000),
    ],
)
def test_chance_is_not_called_a_shift(values):
    verify_routes(values, step=1)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        (agreement(0.1, 1.0, 0.1, 16), "shifted by one token: .* token before in 1 of"),
        (agreement(0.56, 0.1, 0.66, 2000), "shifted by one token: .* token after in 0.66 of"),
        (agreement(0.09, 0.1, 0.08, 200), r"recorded experts in 0\.09 of the cases, .* 0\.1: they are routes of other"),
        (agreement(0.0, 0.0, 0.0, 40), "recorded experts in 0 of the cases"),
    ],
)
def test_wrong_routes_beyond_chance_end_the_run(values, message):
    with pytest.raises(GuardError, match=message):
        verify_routes(values, step=1)


def test_verified_routes_are_the_recorded_ones(recording, routed):
    """A lost layer is named, and so is a shift, of which replay itself loses nothing."""
    model, run = routed
    routes = np.asarray(recording[1].batch.fields[ROUTES])
    verified(model, run(routes), routes)
    other = routes.copy()
    other[:, :, 1] = other_experts(routes, recording[1].batch.token_mask)[:, :, 1]
    with pytest.raises(GuardError, match=r"^step 7: routing\.verify: .* recorded ones \(layer 1: 1 of the tokens\)"):
        verified(model, run(routes), other)
    for shift, neighbour, direction in ((-1, "before", "later"), (1, "after", "earlier")):
        shifted = np.roll(routes, shift, axis=1)
        expected = rf"shifted by one token: .* of the token {neighbour} in 1 of .* one token {direction}"
        with pytest.raises(GuardError, match=expected):
            verified(model, run(shifted), shifted)
    for unrelated in (routes[:, :, ::-1], other_experts(routes, recording[1].batch.token_mask)):
        with pytest.raises(GuardError, match=r"recorded experts in .* routes of other layers, of other rows or"):
            verified(model, run(unrelated), unrelated)
    with pytest.raises(GuardError, match="no routes were recorded"):
        verified(model, run(routes), np.full_like(routes, -1))


def test_threshold_reaches_the_policy():
    config = tiny.config_of(*OPTIONS, "routing.threshold=0.5")
    assert make_policy_model(config, tiny.ByteTokenizer()).config.replay_threshold == 0.5
    for option, name in (("routing.replay=none", "replay is none"), ("routing.verify=true", "verify is true")):
        with pytest.raises(UserError, match=rf"routing\.threshold: got 0\.5, but routing\.{name}"):
            tiny.config_of(*OPTIONS, "routing.threshold=0.5", option)


def test_verify_needs_routes_to_replay():
    with pytest.raises(UserError, match=r"routing\.verify: got true, but with routing\.replay none"):
        tiny.config_of(*OPTIONS, "routing.replay=none", "routing.verify=true")


def damaged(routes: np.ndarray, problem: str) -> np.ndarray:
    routes = routes.copy()
    if problem == "missing":
        routes[1, 4] = -1
    elif problem == "twice":
        routes[1, 4, 2] = 3
    elif problem == "unknown":
        routes[1, 4, 2] = 0, COUNT
    elif problem == "layers":
        routes = routes[:, :, :2]
    elif problem == "prompt":
        routes[1, 4, 0] = (routes[1, 4, 0] + 1) % COUNT
    return routes


@pytest.mark.parametrize(
    ("problem", "message"),
    [
        ("missing", "routed_experts: row 1 has no experts for 1 of its"),
        ("twice", r"row 1, column 4, layer 2: got the experts \[3, 3\], expected different ones from 0 to 5"),
        ("unknown", r"row 1, column 4, layer 2: got the experts \[0, 6\], expected different ones from 0 to 5"),
        ("layers", "got 2 layers x 2 experts, expected 3 x 2; only layers with experts count"),
        ("prompt", "completions of one prompt have other experts for its tokens; set optim.share_prompts=false"),
    ],
)
def test_wrong_routes_are_named_before_a_step(problem, message, recording):
    context = context_of(recording[0])
    completions = open_source(context).sample(Request.of(context, 0))
    fields = {**completions.fields, ROUTES: damaged(completions.fields[ROUTES], problem)}
    changed = dataclasses.replace(completions, fields=fields)
    with pytest.raises(SourceError, match=message):
        tiny.rollout_of(context, changed)
    if problem == "missing":
        choosing = context_of(recording[0], "routing.missing=choose", PADDED)
        assert tiny.rollout_of(choosing, changed).batch.fields[ROUTES].shape == (*completions.tokens.shape, *SHAPE)


def test_a_row_without_a_completion_needs_no_routes_of_its_last_token(recording):
    """Its prompt ends the row, and no sampler computes the last token of one."""
    context = context_of(recording[0])
    completions = open_source(context).sample(Request.of(context, 0))
    token_mask, completion_mask = np.array(completions.token_mask), np.array(completions.completion_mask)
    token_mask[0, tiny.PROMPT :] = completion_mask[0, tiny.PROMPT :] = False
    routes = np.array(completions.fields[ROUTES])
    routes[0, tiny.PROMPT - 1 :] = -1
    changed = dataclasses.replace(
        completions,
        token_mask=token_mask,
        completion_mask=completion_mask,
        fields={**completions.fields, ROUTES: routes},
    )
    assert tiny.rollout_of(context, changed).batch.fields[ROUTES].shape == routes.shape


def test_packed_rows_share_prompts_of_equal_routes_alone(recording):
    """Rows of one micro-batch each share no prompt unless they are packed."""
    context = context_of(recording[0], "optim.micro_batches=16", "optim.updates_per_batch=1")
    packed = context_of(recording[0], "optim.micro_batches=16", "optim.updates_per_batch=1", "optim.packing=true")
    completions = open_source(context).sample(Request.of(context, 0))
    fields = {**completions.fields, ROUTES: damaged(completions.fields[ROUTES], "prompt")}
    changed = dataclasses.replace(completions, fields=fields)
    assert tiny.rollout_of(context, changed).batch.fields[ROUTES].shape == fields[ROUTES].shape
    with pytest.raises(SourceError, match="completions of one prompt have other experts for its tokens"):
        tiny.rollout_of(packed, changed)


def test_routes_of_a_dense_model_are_refused(recording):
    context = context_of(recording[0], "model.experts=null")
    with pytest.raises(SourceError, match=r"the model has no experts; set routing\.replay=none"):
        collect(context, open_stream(context), 0)


def test_recorded_duplicates_are_named_with_their_line(recording, tmp_path):
    lines = (recording[0] / "00000000.jsonl").read_text().splitlines()
    row = {name: value for name, value in json.loads(lines[0]).items() if name != "kljax_check"}
    row[ROUTES][2][1] = [4, 4]
    (tmp_path / "rows.jsonl").write_text(json.dumps(row) + "\n")
    with pytest.raises(UserError, match=r"line 1: routed_experts: got the experts \[4, 4\], expected different ones"):
        open_source(context_of(tmp_path / "rows.jsonl"))
