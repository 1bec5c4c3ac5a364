"""Drawn configs, each trained for two steps by the loop itself: finite, compiled once, and continued bit for bit."""

import dataclasses
import itertools
from collections.abc import Iterator
from types import NoneType, SimpleNamespace
from typing import Annotated, Any, Literal, get_args, get_origin

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import kljax
from kljax.aggregation import MODES
from kljax.kl import ESTIMATORS, GRADIENTS
from tests import tiny
from train.config.algorithms import ADVANTAGES, CONTROLLERS, KL_SCHEDULES, LOSSES, OPTIMIZERS
from train.config.errors import ConfigError
from train.config.kl import CONTROLLER_VARIANTS, KL_SCHEDULE_VARIANTS
from train.config.load import parse
from train.config.loss import ADVANTAGE_VARIANTS, LOSS_VARIANTS
from train.config.optim import OPTIMIZER_VARIANTS, SCHEDULE_VARIANTS
from train.config.plan import Layout, Plan
from train.config.schema import Checkpoint, Config
from train.references.follow import with_abstract_reference
from train.rl.reference import FrozenWeights
from train.rl.step import make_control, make_prepare, make_score, make_update
from train.rollouts.collect import Rollout
from train.run import loop
from train.run.loop import rl_step
from train.run.programs import Programs, updated_part
from train.sequences.packing import make_packer
from train.weights.orbax import RunCheckpoints

RAW = {
    **tiny.RAW,
    "model": {"layers": 1, "width": 8, "heads": 1, "kv_heads": 1, "head_dim": 8, "mlp_width": 8},
}
EPISODES = {"name": "train.data.environments.calculator:Calculator", "max_turns": 2}
FAMILIES = {
    "loss": LOSS_VARIANTS,
    "advantage": ADVANTAGE_VARIANTS,
    "controller": CONTROLLER_VARIANTS,
    "kl_schedule": KL_SCHEDULE_VARIANTS,
    "optimizer": OPTIMIZER_VARIANTS,
    "schedule": SCHEDULE_VARIANTS,
}


class Draw:
    """Draws valid sections from the schema; a field keeps its default in half of the cases."""

    def __init__(self, seed: int) -> None:
        self.rng = np.random.default_rng(seed)

    def one_of(self, values: Any) -> Any:
        return values[self.rng.integers(len(values))]

    def often(self, share: float) -> bool:
        return bool(self.rng.random() < share)

    def variant(self, family: str, name: str, skip: tuple[str, ...] = ()) -> dict[str, Any]:
        model = next(v for v in FAMILIES[family] if get_args(v.model_fields["type"].annotation) == (name,))
        common = model.__bases__[0].model_fields
        section: dict[str, Any] = {"type": name}
        for field, info in model.model_fields.items():
            if field in common or field in skip:
                continue
            if field == "schedule":
                section[field] = self.variant("kl_schedule", self.one_of([*KL_SCHEDULES]))
            elif info.is_required() or self.often(0.5):
                section[field] = self.value(info.annotation, tuple(info.metadata), info.get_default())
        return section

    def value(self, annotation: Any, metadata: tuple[Any, ...], default: Any) -> Any:
        if get_origin(annotation) is Annotated:
            inner, *more = get_args(annotation)
            return self.value(inner, (*more, *metadata), default)
        if get_origin(annotation) is Literal:
            return self.one_of(get_args(annotation))
        if NoneType in get_args(annotation):
            kind = next(item for item in get_args(annotation) if item is not NoneType)
            return None if self.often(0.3) else self.value(kind, metadata, default)
        if annotation is bool:
            return self.often(0.5)
        low, high = self.bounds(metadata)
        if annotation is int:
            return int(self.rng.integers(low, min(high, low + 4) + 1))
        if isinstance(default, float) and default > 0:
            low, high = max(min(low, default), default / 2), min(high, default * 2)
        return float(self.rng.uniform(max(low, -1.0), min(high, max(low, -1.0) + 2.0)))

    def bounds(self, metadata: tuple[Any, ...]) -> tuple[float, float]:
        low, high = -np.inf, np.inf
        for item in itertools.chain.from_iterable(getattr(m, "metadata", [m]) for m in metadata):
            low = max(low, getattr(item, "ge", low), getattr(item, "gt", low - 0.01) + 0.01)
            high = min(high, getattr(item, "le", high), getattr(item, "lt", high + 0.01) - 0.01)
        return low, high


def draw_config(seed: int, loss: str, advantage: str, optimizer: str, controller: str) -> Config:
    """Draws one valid config with these algorithms; combinations that the checks refuse are drawn anew."""
    draw = Draw(seed)
    for _ in range(200):
        raw = draw_raw(draw, loss, advantage, optimizer, controller)
        try:
            return parse(raw)[0]
        except ConfigError as error:
            refused = error.problems
    raise AssertionError(f"no valid config of {loss}, {advantage}: {refused}")


def draw_raw(draw: Draw, loss: str, advantage: str, optimizer: str, controller: str) -> dict[str, Any]:
    section = draw.variant("loss", loss) | {"aggregation": draw.one_of(MODES)}
    if section["aggregation"] == "seq_mean_token_sum_norm":
        section["max_length"] = tiny.NEW_TOKENS
    if draw.often(0.3):
        section["entropy_coef"] = 0.01
    if advantage == "gae" and loss != "cross_entropy":
        section |= {"value_coef": 0.5, "value_clip": draw.one_of([None, 0.2])}
    term = draw.one_of(["reward", "loss", "advantage"])
    kl: dict[str, Any] = {term: {"coef": 0.1, "controller": draw.variant("controller", controller)}}
    for name in {"loss", "rollout"} - {term}:
        if draw.often(0.4):
            kl[name] = {"coef": 0.1}
    if "loss" in kl and draw.often(0.7):
        kl["loss"] |= {"estimator": draw.one_of([*ESTIMATORS, "exact"]), "value_clip": draw.one_of([None, 2.0])}
        kl["loss"] |= {} if kl["loss"]["estimator"] == "exact" else {"gradient": draw.one_of(GRADIENTS)}
        kl["loss"] |= {"importance_corrected": True} if draw.often(0.3) else {}
    # Scored in two parts all the same, so that configs share the program that scores.
    updates, parts = (2, 1) if loss in ("clip_cov", "kl_cov") else draw.one_of([(2, 1), (1, 2)])
    return {
        **RAW,
        **({"environment": EPISODES} if advantage == "turn_credit" else {}),
        "loss": section,
        "advantage": draw.variant("advantage", advantage) | {"whiten": draw.often(0.3)},
        "kl": kl,
        "optim": {
            "optimizer": draw.variant("optimizer", optimizer),
            "schedule": draw.variant("schedule", draw.one_of(["constant", "linear", "cosine", "wsd"])),
            "learning_rate": 1e-3,
            "warmup_steps": draw.one_of([0, 2]),
            "updates_per_batch": updates,
            "micro_batches": parts,
            "share_prompts": False,  # no algorithm sees it, and its programs take a fifth longer to make
            "packing": updates == 1 and draw.often(0.3),  # each update may be a program of its own
        },
    }


def covering(count: int) -> Iterator[tuple[int, str, str, str, str]]:
    """Lists algorithms so that every name of every family is among the first few; then come those that compile soon."""
    families = ([*LOSSES], [*ADVANTAGES], [*OPTIMIZERS], [*CONTROLLERS])
    quick = ("ppo", "grpo", "sgd", "fixed")
    rng = np.random.default_rng(0)
    for seed in range(count):
        if seed < max(map(len, families)):
            names = [family[seed] if seed < len(family) else name for family, name in zip(families, quick, strict=True)]
        else:
            names = [family[rng.integers(len(family))] for family in families]
        if names[0] == "cross_entropy":
            names[1] = "grpo"  # it reads no advantages
        yield seed, *names


COVERING = [*covering(len(LOSSES))]
DRAWN = [*covering(100)][len(LOSSES) :]


class RecordedRun:
    """A source of completions that are already there."""

    def update(self, *policy: Any) -> None:
        """Takes no policy."""


@pytest.fixture
def recorded(monkeypatch):
    def draw(context: Any, source: Any, step: int) -> Rollout:
        batch, completions = jax.device_put(tiny.rollout_batch(step)), SimpleNamespace(timings={}, metrics={})
        if context.plan.turns:
            turns = jnp.cumsum(batch.completion_mask, -1) % context.plan.turns
            scores = jnp.sin(jnp.arange(turns.size, dtype=jnp.float32)).reshape(turns.shape)
            batch = dataclasses.replace(batch, fields={**batch.fields, "turn_ids": turns, "turn_scores": scores})
        return Rollout(completions, batch)

    monkeypatch.setattr(loop, "draw", draw)
    monkeypatch.setattr(loop, "arrive", lambda drawn: drawn)
    monkeypatch.setattr(loop, "judge_drawn", lambda context, drawn, step: drawn)


SCORE_READS = (
    *("reference", "ref_log_probs", "exact_loss", "exact_reward"),
    *("scores_policy", "value_head", "sum_squared_probs"),
)
Scores = dict[Any, Any]


@pytest.fixture(scope="module")
def scores() -> Scores:
    """Programs that score a batch, by the parts of the plan that they read."""
    return {}


def programs_of(context: Any, state: Any, scores: Scores) -> Programs:
    config, model, mesh = context.config, context.model, context.mesh
    plan, parts = Plan.of(config), config.optim.updates_per_batch * config.optim.micro_batches
    read = parts, Layout.of(config), *(getattr(plan, name) for name in SCORE_READS)
    if read not in scores:
        scores[read] = make_score(Plan.of(config), model, mesh)
    return Programs(
        score=scores[read],
        prepare=make_prepare(Plan.of(config), mesh),
        update=make_update(Plan.of(config), model, context.optimizer, updated_part(state), mesh),
        control=make_control(Plan.of(config), mesh),
        follow=None,
        pack=make_packer(Plan.of(config), mesh),
    )


def run_two_steps(config: Config, scores: Scores, directory: Any = None) -> None:
    """Trains for two steps; with a directory the second one is also made from a restored state."""
    from train.models.parameters import init_params
    from train.rl.policy import ScoredPolicy
    from train.run.setup import first_state

    context = tiny.context_of(config)
    params = init_params(context.model, jax.random.key(0), context.mesh)
    frozen = FrozenWeights(None, ScoredPolicy(context.model, kljax.Policy(tiny.moved(params, 0.05))))
    with jax.set_mesh(context.mesh):
        state = first_state(Plan.of(config), context.model, context.mesh, tiny.copied(params), context.optimizer)
        programs = programs_of(context, state, scores)
        state, values, _ = rl_step(context, programs, RecordedRun(), frozen, state, step=0)
        assert np.isfinite([*values.values()]).all(), values
        after = None
        if directory is not None:
            checkpoints = RunCheckpoints(directory, Checkpoint(every=1, keep=1))
            checkpoints.save(state, 1)
            restored = checkpoints.restore_last(with_abstract_reference(Plan.of(config), state))
            checkpoints.close()
            after, again, _ = rl_step(context, programs, RecordedRun(), frozen, restored, step=1)
        state, values, _ = rl_step(context, programs, RecordedRun(), frozen, state, step=1)
    assert np.isfinite([*values.values()]).all(), values
    chex.assert_tree_all_finite(jax.device_get(state.trainable))
    if after is not None:
        assert again == values
        chex.assert_trees_all_equal(after, state)


def described(case: tuple[int, str, str, str, str]) -> str:
    return "-".join(map(str, case))


@pytest.mark.parametrize("case", COVERING, ids=described)
def test_every_algorithm_trains_two_steps(case, recorded, scores, tmp_path):
    seed = case[0]
    run_two_steps(draw_config(*case), scores, tmp_path if seed % 4 == 0 else None)


@pytest.mark.thorough
@pytest.mark.parametrize("case", DRAWN, ids=described)
def test_drawn_configs_train_two_steps(case, recorded, scores, tmp_path):
    seed = case[0]
    run_two_steps(draw_config(*case), scores, tmp_path if seed % 10 == 0 else None)


def test_covering_cases_have_every_name():
    for column, table in enumerate((LOSSES, ADVANTAGES, OPTIMIZERS, CONTROLLERS), start=1):
        assert {case[column] for case in COVERING} == set(table)
