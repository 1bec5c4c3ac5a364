"""The tables of algorithms: complete, with the defaults of the library, and chosen by name."""

import importlib
import typing

import pytest

import kljax
from tests.train.config.built import build, problems
from train.config import algorithms
from train.config.algorithms import (
    ADVANTAGES,
    CORRECTIONS,
    LOSS_FUNCTIONS,
    LOSSES,
    NOT_CORRECTIONS,
    NOT_ESTIMATORS,
    NOT_POLICY_LOSSES,
    SET_BY_TRAINER,
)
from train.config.errors import ConfigError
from train.config.fields import known_fields, variant_fields
from train.config.kl import AdvantageKL, LossKL, RewardKL, RolloutKL
from train.config.load import apply_overrides, dump_yaml, parse
from train.config.loss import ADVANTAGE_VARIANTS, LOSS_VARIANTS
from train.config.plan import Plan
from train.config.signatures import read_signature
from train.config.types import RANGES, RANGES_OF
from train.config.yaml_text import parse_yaml


@pytest.mark.parametrize(
    ("module", "table", "others"),
    [
        ("losses", LOSS_FUNCTIONS, NOT_POLICY_LOSSES),
        ("advantages", ADVANTAGES, NOT_ESTIMATORS),
        ("ratios", CORRECTIONS, NOT_CORRECTIONS),
    ],
)
def test_every_library_function_is_listed_or_exempt(module, table, others) -> None:
    chosen = {target.rpartition(":")[2] for target in table.values()}
    public = set(importlib.import_module(f"kljax.{module}").__all__)
    assert chosen | others.keys() == public
    assert not chosen & others.keys()
    assert all(others.values())


def test_policy_losses_of_systems_are_policy_losses_here() -> None:
    for kind, table, others in (
        ("policy_loss", LOSS_FUNCTIONS, NOT_POLICY_LOSSES),
        ("advantage", ADVANTAGES, {**NOT_ESTIMATORS, "masked_whiten": "advantage.whiten"}),
        ("correction", CORRECTIONS, {**NOT_CORRECTIONS, **NOT_ESTIMATORS}),
    ):
        chosen = {target.rpartition(":")[2] for target in table.values()}
        for entry in kljax.systems.entries(kind=kind):
            assert entry.call is None or entry.call.function in chosen | others.keys(), entry.key


def test_every_table_number_has_a_used_range() -> None:
    tables = (
        LOSS_FUNCTIONS,
        ADVANTAGES,
        CORRECTIONS,
        algorithms.CONTROLLERS,
        algorithms.ENTROPY_CONTROLLERS,
        algorithms.KL_SCHEDULES,
        algorithms.OPTIMIZERS,
    )
    names, pairs = set(), set()
    for table in tables:
        for target in table.values():
            signature = read_signature(target)
            names |= {p.name for p in signature.parameters}
            pairs |= {(target.rpartition(":")[2], p.name) for p in signature.parameters}
    assert RANGES.keys() <= names
    assert RANGES_OF.keys() <= pairs


@pytest.mark.parametrize("name", LOSSES)
def test_a_loss_has_the_defaults_of_its_function(name: str) -> None:
    required = ["loss.coef=0.5"] if name == "dro" else []
    config, _ = build(f"loss={name}", *required)
    options = [p for p in read_signature(LOSSES[name].function).parameters if p.name not in SET_BY_TRAINER]
    expected = {p.name: p.default for p in options if p.keyword and p.type is not None}
    assert config.loss.options() == {**expected, **({"coef": 0.5} if required else {})}
    assert parse(parse_yaml(dump_yaml(config))[0])[0] == config
    assert hash(config) == hash(build(f"loss={{type: {name}}}", *required)[0])


@pytest.mark.parametrize("name", ADVANTAGES)
def test_an_estimator_has_the_defaults_of_its_function(name: str) -> None:
    episodes = "environment={name: 'train.data.environments.calculator:Calculator'}"
    more = {"gae": ["loss.value_coef=0.5"], "turn_credit": [episodes]}.get(name, [])
    config, _ = build(f"advantage={name}", *more)
    arguments = {
        p.name: p.default
        for p in read_signature(ADVANTAGES[name]).parameters
        if p.type is not None and p.name != "num_groups"
    }
    assert config.advantage.options() == arguments
    assert parse(parse_yaml(dump_yaml(config))[0])[0] == config


def test_fields_of_a_family_are_in_every_variant() -> None:
    for variants, common in ((LOSS_VARIANTS, "aggregation"), (ADVANTAGE_VARIANTS, "whiten")):
        assert all(common in variant.model_fields for variant in variants)
    assert known_fields()["loss.type"].choices == (*LOSSES, "none", "custom")
    assert known_fields()["advantage.type"].choices == (*ADVANTAGES, "custom")
    assert known_fields()["loss.type"].default == "ppo"


@pytest.mark.parametrize(
    ("override", "start"),
    [
        ("loss=sapoo", "loss.type: got 'sapoo', expected one of ppo, cispo,"),
        ("loss=dro", "loss.coef: missing, expected a number > 0"),
        (
            "loss={type: sapo, clip_low: 0.1}",
            "loss.clip_low: not a field when loss.type is sapo; change loss.type (ppo",
        ),
        ("loss={type: cispo, clip_low: 2}", "loss.clip_low: got 2, expected a number >= 0 and <= 1"),
        ("loss={type: gspo, gradient: rows}", "loss.gradient: got 'rows', expected one of token, sequence"),
        ("advantage={type: rloo, scale: std}", "advantage.scale: not a field when advantage.type is rloo; change"),
        ("optim.optimizer={type: lion, b2: 1}", "optim.optimizer.b2: got 1, expected a number >= 0 and < 1"),
        ("optim.schedule=cosine", "optim.schedule.decay_steps: missing, expected an integer >= 1"),
        ("kl.loss.controller={type: pi, target: 1, kp: 1}", "kl.loss.controller.ki: missing, expected a number >= 0"),
        (
            "kl.loss.controller={type: scheduled, schedule: {type: cosinus}}",
            "kl.loss.controller.schedule.type: got 'cosinus', expected one of linear, cosine, exponential, polynomial",
        ),
    ],
)
def test_mistake_is_named_by_its_chosen_variant(override: str, start: str) -> None:
    raw: dict = {"steps": 5}
    actual = apply_overrides(raw, [override])
    if not actual:
        with pytest.raises(ConfigError) as caught:
            parse(raw)
        actual = list(caught.value.problems)
    assert actual[0].startswith(start)


def test_name_alone_can_be_followed_by_fields() -> None:
    config, _ = build("loss=gspo", "loss.clip_high=0.01", "advantage=rloo", "optim.optimizer=lion")
    assert (config.loss.type, config.loss.options()["clip_high"]) == ("gspo", 0.01)
    assert (config.advantage.type, config.optim.optimizer.type) == ("rloo", "lion")


def test_a_name_of_another_system_is_its_meaning() -> None:
    config, notes = build("loss=verl/vanilla", "advantage=verl/gae", "loss.value_coef=0.5")
    assert config.loss.options() | {"dual_clip": 3.0, "log_ratio_clip": 20.0} == config.loss.options()
    assert (config.advantage.type, config.advantage.whiten) == ("gae", True)
    assert notes[0].startswith("loss: verl/vanilla means type ppo, clip_low 0.2")
    # An option of the system is set beside its name; what the name means is not contradicted.
    config, _ = build("loss={type: verl/vanilla, clip_high: 0.28}")
    assert config.loss.options()["clip_high"] == 0.28
    (line,) = problems("loss={type: verl/vanilla, log_ratio_clip: 10}")
    assert line.startswith("loss.log_ratio_clip: got 10, but loss.type verl/vanilla means 20.0; set only one of them")
    (line,) = problems("loss=trinity/ppo+fallback_to_policy_gradient")
    assert "its ratio is to stop_gradient(log_probs)" in line
    # In bypass mode the recorded log-probs are the old ones.
    assert build("loss=verl/bypass_mode")[0].loss.old_log_probs == "sampler"
    (line,) = problems("advantage=verl/remax")
    assert "it is kljax.remax_advantages(), which one choice of type does not express" in line


def test_plan_facts_come_from_the_signatures() -> None:
    def plan(*overrides: str) -> Plan:
        return Plan.of(build(*overrides)[0])

    assert plan("loss=clip_cov").key
    assert plan("loss=clip_cov").whole_update
    assert not plan("loss=ppo").whole_update
    assert plan("loss=cross_entropy").advantage is None
    assert plan("advantage=iw_opd").ref_log_probs
    assert plan("advantage=iw_opd").old_log_probs
    assert plan("advantage=otb").fields[-1] == "sum_squared_probs"
    assert plan("advantage=otb").scores_policy
    assert plan("advantage=gae", "loss.value_coef=1").value_head
    assert plan("kl.loss={coef: 1, controller: {type: pi, target: 1, kp: 1, ki: 1}}").steers_loss
    assert not plan("kl.loss.coef=1").steers_loss
    assert plan("kl.loss={controller: {type: scheduled, schedule: {end_value: 1, transition_steps: 4}}}").reference
    (line,) = problems("loss=kl_cov", "optim.micro_batches=2")
    assert line.startswith("optim.micro_batches: got 2, but loss.type kl_cov compares all tokens of an update")


USER = '''
import jax.numpy as jnp

def loss(log_probs, old_log_probs, advantages, mask, *, power: float = 1.0):
    """Mine."""
    return jnp.where(mask, -advantages * jnp.exp(power * (log_probs - old_log_probs)), 0)

def lost(log_probs, mask, galaxies, power):
    return log_probs
'''


@pytest.fixture
def mine(tmp_path):
    path = tmp_path / "mine.py"
    path.write_text(USER)
    return path


def test_a_function_of_the_user_takes_its_arguments(mine) -> None:
    config, _ = parse({"steps": 1, "loss": {"type": f"{mine}:loss", "power": 2.0, "aggregation": "token_sum"}})
    assert (config.loss.type, config.loss.function) == ("custom", f"{mine}:loss")
    assert (config.loss.options(), config.loss.aggregation) == ({"power": 2.0}, "token_sum")
    assert parse(parse_yaml(dump_yaml(config))[0])[0] == config
    assert Plan.of(config).advantage is not None


def test_incomplete_user_functions_are_named(mine) -> None:
    def lines(section: str, **fields) -> list[str]:
        with pytest.raises(ConfigError) as caught:
            parse({"steps": 1, section: fields})
        return list(caught.value.problems)

    array, argument = lines("loss", type=f"{mine}:lost")
    assert array.startswith("loss.function: ")
    assert "reads the array 'galaxies', which does not exist; available: log_probs, mask, entropies, key" in array
    assert "reads the array 'power'" in argument
    (line,) = lines("loss", type=f"{mine}:loss", powr=1.0)
    assert line.startswith("loss.arguments: ")
    assert line.endswith("has no argument 'powr', expected some of power; did you mean 'power'?")
    (line,) = lines("loss", type="no_such_module:f")
    assert line == "loss.function: got 'no_such_module:f', but there is no module 'no_such_module'"
    (line,) = lines("advantage", type=f"{mine}:nothing")
    assert line.endswith("has no function 'nothing'")


def test_every_field_of_an_algorithm_has_a_meaning() -> None:
    sections = ("loss.", "advantage.", "correction.", "optim.optimizer.", "optim.schedule.", "kl.loss.controller.")
    for (path, variant), known in variant_fields().items():
        assert known.doc or not path.startswith(sections) or known_fields()[path].doc, (path, variant)


TERMS = {
    "kl_shaped_rewards": (RewardKL, {}),
    "reference_kl_loss": (LossKL, {}),
    "centered_kl_advantages": (AdvantageKL, {}),
    # Zero, and another name of k3, are no penalties for a sampler that drifts.
    "rollout_kl_loss": (RolloutKL, {"estimator": {"none", "low_var_kl"}}),
}


@pytest.mark.parametrize("function", TERMS)
def test_kl_term_has_the_options_of_its_function(function: str) -> None:
    section, without = TERMS[function]
    fields = section.model_fields
    for parameter in read_signature(f"kljax:{function}").parameters:
        if parameter.type is None or parameter.name == "coef":
            continue
        assert fields[parameter.name].default == parameter.default, parameter.name
        offered, known = (set(typing.get_args(of)) for of in (fields[parameter.name].annotation, parameter.type))
        if all(isinstance(name, str) for name in known):
            flat = {name for entry in offered for name in (typing.get_args(entry) or (entry,))}
            assert flat - {"exact"} == known - without.get(parameter.name, set())
