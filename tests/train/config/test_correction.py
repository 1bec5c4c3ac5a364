"""The list of corrections in a config: its entries, its default, what contradicts it, and what is warned of."""

import pytest

import kljax
from tests.train.config.built import build, problems
from train.config.algorithms import CORRECTIONS
from train.config.correction import CORRECTION_VARIANTS
from train.config.fields import known_fields
from train.config.load import apply_overrides, dump_yaml, parse
from train.config.plan import Plan
from train.config.signatures import read_signature
from train.config.yaml_text import parse_yaml
from train.rollouts.lag import reads_lags
from train.run.user_functions import check_user_functions

OPENAI = "rollout.source={type: openai, url: 'http://host:1', model: m}"
AHEAD = "rollout.ahead=1"
FILE = "rollout.source={type: file, path: tests}"
WEIGHTS = "correction=[{type: truncated_importance_weights}]"
REQUIRED = {
    "divergence_mask": {"max_divergence": 0.1},
    "off_policy_sequence_mask": {"max_kl": 0.1},
    "max_lag": {"max_lag": 2},
}
BOUNDED = {"rejection_mask": {"upper": 2.0}, "kl_rejection_mask": {"upper": 2.0}}


@pytest.mark.parametrize("name", CORRECTIONS)
def test_an_entry_has_the_defaults_of_its_function(name: str) -> None:
    fields = {**REQUIRED, **BOUNDED}.get(name, {})
    config, _ = parse({"steps": 5, "correction": {"type": name, **fields}})
    (entry,) = config.correction
    signature = read_signature(CORRECTIONS[name])
    assert entry.options() == {
        **{p.name: p.default for p in signature.parameters if p.keyword and p.type is not None},
        **fields,
    }
    assert signature.returns == ("Bool" if CORRECTIONS[name].endswith("mask") else "Float")
    assert parse(parse_yaml(dump_yaml(config))[0])[0] == config
    plan = Plan.of(config)
    assert (plan.old_log_probs, plan.rollout_log_probs, plan.scores_policy) == (True, True, True)


def test_the_fields_of_an_entry_are_known() -> None:
    assert known_fields()["correction.type"].choices == (*CORRECTIONS, "custom")
    assert len(CORRECTION_VARIANTS) == len(CORRECTIONS) + 1
    assert not Plan.of(build()[0]).mismatch


def test_completions_of_a_server_are_corrected_by_default() -> None:
    for ahead in ((), (AHEAD,)):
        config, warnings = build(OPENAI, *ahead)
        (entry,) = config.correction
        assert (entry.type, entry.options()) == ("truncated_importance_weights", {"level": "token", "max_weight": 2.0})
        assert warnings == ()
    assert build()[0].correction == ()
    assert build(FILE)[0].correction == ()
    # Where its weights have nothing to multiply, or the ratio is in the loss already, the default is off.
    for options in (("loss=none", "kl.loss.coef=1"), ("loss.old_log_probs=sampler",)):
        assert build(OPENAI, *options)[0].correction == ()
    assert build(OPENAI, "rollout.record_log_probs=false")[0].correction == ()


def test_uncorrected_completions_of_another_policy_are_warned_of() -> None:
    for options, start in (
        ((OPENAI, "correction=[]"), "rollout.source.type: openai samples outside of this process, and nothing corre"),
        (
            (OPENAI, AHEAD, "correction=[]"),
            "rollout.ahead: completions come from the policy of 1 step ago, and nothing",
        ),
        ((FILE,), "rollout.source.type: file samples outside of this process, and nothing corrects for the mismatch"),
        (("rollout.policy_lag=2",), "rollout.policy_lag: completions come from the policy of 2 steps ago, and nothing"),
    ):
        (warning,) = build(*options)[1]
        assert warning.startswith(start)
        for remedy in (WEIGHTS, "kl.rollout.coef=0.1", "loss.old_log_probs=sampler"):
            fixed = [option for option in options if not option.startswith("correction")]
            arguments = [*fixed, "correction=[]", remedy] if remedy != WEIGHTS else [*fixed, remedy]
            assert build(*arguments)[1] == ()


@pytest.mark.parametrize(
    ("overrides", "start"),
    [
        (("correction=[{upper: 2}]",), "correction[0].type: missing, expected one of importance_weights, truncated_im"),
        (
            ("correction=[veto_mask, {type: importance_weigths}]",),
            "correction[1].type: got 'importance_weigths', expected one of importance_weights, truncated",
        ),
        (("correction=[{type: importance_weights, upper: -2}]",), "correction[0].upper: got -2, expected a number > 0"),
        (
            ("correction=[{type: veto_mask, upper: 2}]",),
            "correction[0].upper: not a field when correction[0].type is veto_mask; change correction[0].type (import",
        ),
        (
            ("correction=[{type: veto_mask, uper: 2}]",),
            "correction[0].uper: unknown field, expected one of type, level",
        ),
        (("correction=3",), "correction: got 3, expected a list of mappings, each with type (importance_weights, "),
        (
            ("correction={type: rejection_mask}",),
            "correction[0]: got null for lower and upper, but rejection_mask needs a bound; set at least one",
        ),
        (
            ("correction=[{type: importance_weights, lower: 1}]",),
            "correction[0].lower: got 1, but mode truncate has no lower bound; set mode=clip or mode=mask",
        ),
        (
            ("correction=[{type: veto_mask, min_ratio: 3, max_ratio: 2}]",),
            "correction[0].min_ratio: got 3, expected at most max_ratio = 2",
        ),
        (
            (WEIGHTS, "rollout.record_log_probs=false"),
            "rollout.record_log_probs: got false, but correction reads the log-probs that the sampler records; set tr",
        ),
        (
            (WEIGHTS, "loss.old_log_probs=sampler"),
            "correction[0]: got truncated_importance_weights, but with loss.old_log_probs sampler the ratio of loss.t",
        ),
        (
            (WEIGHTS, "loss=none", "kl.loss.coef=1"),
            "correction[0]: got truncated_importance_weights, whose weights multiply the policy term, but loss.type i",
        ),
        (
            ("correction={type: off_policy_sequence_mask, max_kl: 0.1}", "loss=none", "kl.loss.coef=1"),
            "correction[0]: got off_policy_sequence_mask, which reads advantages, but loss.type none uses none",
        ),
        (("loss.rejected_tokens=count",), "loss.rejected_tokens: got count, but correction is empty, so nothing is"),
        (("loss={type: gpg, old_log_probs: sampler}",), "loss.old_log_probs: got sampler, but loss.type gpg has no"),
        (("correction=verl/token_k1",), "correction[0]: got null for lower and upper, but kl_rejection_mask needs a"),
        (("correction=trinity/clipb",), "correction[0].type: got 'trinity/clipb'; it is kljax.clip_b_mask(mu=2.5), wh"),
    ],
)
def test_a_mistake_is_named_by_its_entry(overrides: tuple[str, ...], start: str) -> None:
    (problem,) = problems(*overrides)
    assert problem.startswith(start), problem


def test_field_of_an_entry_needs_its_list() -> None:
    (problem,) = apply_overrides({}, ["correction.level=token"])
    assert problem == "correction.level: a field of the entries of a list; set correction=[{type: ..., level: ...}]"


def test_names_of_other_systems() -> None:
    config, notes = build("correction=[verl/rollout_is=token, {type: verl/token_k1, upper: 0.7}]")
    weights, mask = config.correction
    assert weights.options() | {"mode": "truncate", "upper": 2.0, "log_ratio_clip": 20.0} == weights.options()
    assert (mask.type, mask.options()["estimator"], mask.options()["upper"]) == ("kl_rejection_mask", "k1", 0.7)
    assert [note.partition(" means ")[0] for note in notes] == [
        "correction[0]: verl/rollout_is=token",
        "correction[1]: verl/token_k1",
    ]
    # A mask times the ratios of the tokens is two entries.
    config, _ = build("correction=openrlhf/seq+mask+ratio")
    assert [entry.type for entry in config.correction] == ["rejection_mask", "importance_weights"]
    (slime,) = build("correction=slime/mis:token+truncate")[0].correction
    assert (slime.type, slime.level) == ("importance_weights", "token")


OPTIONS = {"lower": 0.005, "upper": 2.0, "max_divergence": 0.1, "max_kl": 0.1}


@pytest.mark.parametrize(
    "key",
    [
        entry.key
        for entry in kljax.systems.entries(kind="correction")
        if entry.call is not None
        and not entry.call.times
        and entry.call.function in {name.rpartition(":")[2] for name in CORRECTIONS.values()}
    ],
)
def test_every_correction_of_a_system_is_a_list(key: str) -> None:
    entry = next(entry for entry in kljax.systems.entries(kind="correction") if entry.key == key)
    fields = {p.name for p in read_signature(CORRECTIONS[entry.call.function]).parameters}
    truncates = entry.call.arguments.get("mode", "truncate") == "truncate" and entry.call.function.endswith("weights")
    missing = fields & OPTIONS.keys() - entry.call.arguments.keys() - ({"lower"} if truncates else set())
    config, _ = parse({"steps": 1, "correction": [{"type": key} | {name: OPTIONS[name] for name in missing}]})
    assert entry.call.arguments.items() <= config.correction[0].options().items()


def test_product_of_corrections_is_refused_with_its_factors() -> None:
    (line,) = problems("correction=verl/decoupled_seq_is_rs")
    assert "importance_weights" in line and "kl_rejection_mask" in line  # noqa: PT018


def test_a_function_of_the_user(tmp_path) -> None:
    path = tmp_path / "mine.py"
    path.write_text('def halve(log_probs, mask, *, by: float = 2.0):\n    """Mine."""\n    return mask / by\n')
    config, _ = build(f"correction=[{{type: '{path}:halve', by: 4.0}}]")
    (entry,) = config.correction
    assert (entry.type, entry.function, entry.options()) == ("custom", f"{path}:halve", {"by": 4.0})
    (line,) = problems(f"correction=[{{type: '{path}:halve', of: 4.0}}]")
    assert line.startswith("correction[0].arguments: ")
    assert (
        line.endswith("has no argument 'of', expected some of by; did you mean 'by'?") or "expected some of by" in line
    )


def test_correction_of_the_user_reads_lags(tmp_path) -> None:
    path = tmp_path / "mine.py"
    path.write_text('def fresh(lags, *, most: int):\n    """Mine."""\n    return lags <= most\n')
    options = f"correction=[{{type: '{path}:fresh', most: 2}}]", "rollout.policy_lag=1"
    plan = Plan.of(build(*options)[0])
    assert reads_lags(plan)
    check_user_functions(plan)
    (line,) = problems(FILE, options[0])
    assert line.startswith("correction[0]: got custom, which reads the lag of each token, but shuffled rows")
