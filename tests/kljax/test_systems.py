"""The table of names: every entry on the recorded results of its system, the lookups, and the command."""

import functools
import inspect
import json
import pathlib
import re
import subprocess
import sys
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable
from typing import Any

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy.special import log_softmax

import kljax
from kljax.__main__ import main
from kljax.systems import Call, Entry, Golden
from kljax.systems._call import steps
from kljax.systems._entry import KINDS
from kljax.systems._table import SYSTEMS
from kljax.tools.systems.compare import comparison_as_json
from kljax.tools.systems.options import find_option
from kljax.tools.systems.text import WIDTH
from tests.goldens import cases
from tests.goldens.plan import REACHES_BOUND, RELEASE_DEFAULTS
from tests.kljax.systems import EXERCISES, cases_of
from tests.kljax.systems.metrics import METRICS
from tests.kljax.systems.unnamed import UNNAMED

ROOT = pathlib.Path(__file__).parents[2]
ENTRIES = kljax.systems.entries()
CHECKED = [(entry, golden) for entry in ENTRIES if entry.call for golden in entry.goldens]
TOGETHER = 8
"""Entries whose recorded results are computed by one program."""
# They decide by the numbers of a case how to go on.
READS_VALUES = (("openrlhf", "compute_advantages_and_returns"),)
# Rows of these functions compare a part of the results each, by their kind; all of them are compared.
PARTS = {("trinity", "ClipBAdvantageFn"), ("trinity", "ClipVAdvantageFn")}
# Rows of these compare a part, or name a part of the cases; `METRICS` compares all results of all cases.
WHOLE_IN_METRICS = {
    ("skyrl", "compute_off_policy_correction"),
    ("skyrl", "apply_reward_kl_penalty"),
    ("verl", "compute_offpolicy_metrics"),
    ("verl", "compute_rollout_rejection_mask"),
}
# What a name may say about an argument in `given` that is not one of the function: a factor, or what a schedule needs.
BESIDE = {"scale", "step"}


def key_of(entry: Entry) -> str:
    return f"{entry.kind}-{entry.key}"


Settings = tuple[Any, ...]


def settings_of(entry: Entry, golden: Golden) -> tuple[Settings, ...]:
    """The settings of the recorded cases of an entry, each once."""
    return tuple({case.settings(): None for case in cases_of(entry, golden)})


def part_of(entry: Entry, settings: Settings) -> str:
    """The part of the results that an entry compares: "" for all, else the kind of the entry."""
    return entry.kind if entry.kind == "statistic" or settings[:2] in PARTS else ""


@functools.cache
def needed() -> dict[tuple[str, str], tuple[Settings, ...]]:
    """For each entry the settings that no other one has run, at least one: so that all entries and settings are run."""
    run: set[tuple[str, Settings]] = set()
    collected = {}
    # What few settings record comes first, as it leaves no choice.
    for entry, golden in sorted(CHECKED, key=lambda pair: len(settings_of(*pair))):
        settings = settings_of(entry, golden)
        new = tuple(s for s in settings if (part_of(entry, s), s) not in run)
        collected[key_of(entry), repr(golden)] = new or settings[:1]
        run.update((part_of(entry, s), s) for s in settings)
    return collected


def run_whole(exercise: Callable[[Entry, cases.Case], None], entry: Entry, case: cases.Case) -> None:
    """Runs an exercise, which has to compare all results of a case, unless others compare what it leaves out."""
    exercise(entry, case)
    if isinstance(case, cases.TracedCase) and not part_of(entry, case.settings()):
        left = set(case.outputs) & cases.RESULTS - case.read
        assert not left or (case.system, case.function) in WHOLE_IN_METRICS, f"{case.id}: {left}"


def compare(recorded: Iterable[tuple[Entry, Golden, Settings]]) -> dict[tuple[str, str], list[cases.Comparison]]:
    """Runs entries on the recorded cases of some settings, as one program; compares at once what reads values."""
    comparisons: dict[tuple[str, str], list[cases.Comparison]] = defaultdict(list)
    names, exercises = [], []
    for entry, golden, settings in recorded:
        alike = [case for case in cases_of(entry, golden) if case.settings() == settings]
        exercise = functools.partial(run_whole, EXERCISES[settings[:2]], entry)
        if settings[:2] in READS_VALUES:
            for case in alike:
                exercise(case)
        else:
            names.append((key_of(entry), repr(golden)))
            exercises.append((alike, exercise))
    for name, actual in zip(names, cases.run_together(exercises), strict=True):
        assert actual, name
        comparisons[name] += actual
    return comparisons


def check(comparisons: dict[tuple[str, str], list[cases.Comparison]], entry: Entry, golden: Golden) -> None:
    for case, actual, expected in comparisons[key_of(entry), repr(golden)]:
        case.assert_matches(actual, expected)


def name_of(entry: Entry, golden: Golden) -> str:
    return f"{key_of(entry)}-{golden.function}"


PROGRAMS = [CHECKED[first : first + TOGETHER] for first in range(0, len(CHECKED), TOGETHER)]


@pytest.mark.parametrize("some", PROGRAMS, ids=[f"{name_of(*some[0])} to {name_of(*some[-1])}" for some in PROGRAMS])
def test_entries_on_the_recorded_results(some: list[tuple[Entry, Golden]]) -> None:
    # One program for all of them takes a third less time than one of each.
    comparisons = compare((*pair, settings) for pair in some for settings in needed()[key_of(pair[0]), repr(pair[1])])
    wrong = {}
    for pair in some:
        assert settings_of(*pair), f"{name_of(*pair)}: no recorded case"
        try:
            check(comparisons, *pair)
        except AssertionError as error:
            wrong[name_of(*pair)] = str(error)
    assert not wrong, "\n".join(f"{name}: {error}" for name, error in wrong.items())


RECORDED = [pytest.param(*pair, id=name_of(*pair)) for pair in CHECKED]


@pytest.mark.thorough
@pytest.mark.parametrize(("entry", "golden"), RECORDED)
def test_entry_on_results_recorded_by_another_entry(entry: Entry, golden: Golden) -> None:
    run = needed()[key_of(entry), repr(golden)]
    rest = [settings for settings in settings_of(entry, golden) if settings not in run]
    check(compare((entry, golden, settings) for settings in rest), entry, golden)


def of_functions(pairs: Iterable[tuple[Any, cases.Case]]) -> list[Any]:
    """Returns the comparisons of recorded cases, with all cases of a function, as parameters of a test."""
    actual: dict[tuple[str, str], list[tuple[Any, cases.Case]]] = defaultdict(list)
    for function, case in pairs:
        actual[case.system, case.function].append((function, case))
    return [pytest.param(of_function, id="-".join(name)) for name, of_function in actual.items()]


IN_BOUNDS = (REACHES_BOUND, RELEASE_DEFAULTS)
WITH_METRICS = [(METRICS.get((c.system, c.function)), c) for c in cases.all_cases() if c.note not in IN_BOUNDS]


@pytest.mark.parametrize("compared", of_functions(pair for pair in WITH_METRICS if pair[0]))
def test_metrics_beside_the_recorded_results(compared: list[tuple[Callable[..., Any], cases.Case]]) -> None:
    for metrics, case in compared:
        case.assert_metrics(metrics(case))


@pytest.mark.parametrize("compared", of_functions(UNNAMED))
def test_recorded_cases_without_a_call(compared: list[tuple[Callable[..., Any], cases.Case]]) -> None:
    for compare_case, case in compared:
        compare_case(case)


def test_every_recorded_case_is_compared() -> None:
    # Those of bounds and defaults in `test_generated_goldens_bounds`.
    named = {settings: None for chosen in needed().values() for settings in chosen}
    others = {case.id for _, case in UNNAMED}
    others |= {case.id for _, case in WITH_METRICS if (case.system, case.function) in WHOLE_IN_METRICS}
    left = {case.id for _, case in WITH_METRICS if case.settings() not in named} - others
    assert not left, left
    assert not {case.id for metrics, case in WITH_METRICS if case.metrics() and not metrics}
    assert {file: sum(case.file == file for case in cases.all_cases()) for file in (cases.SHARED, cases.GENERATED)} == {
        cases.SHARED: 581,
        cases.GENERATED: 790,
    }


@pytest.mark.parametrize("entry", ENTRIES, ids=key_of)
def test_entry_describes_itself(entry: Entry) -> None:
    assert entry.kind in KINDS
    assert entry.system in SYSTEMS
    assert entry.meaning
    # Without a call, or without recorded results, it says why.
    assert bool(entry.reason) == (entry.call is None or not entry.goldens)
    for call, _ in steps(entry.call) if entry.call else ():
        function = getattr(kljax, call.function)
        inspect.signature(function).bind_partial(**call.arguments)
        assert call.function in kljax.__all__
    if entry.call:
        known = {
            name
            for call, _ in steps(entry.call)
            for name in inspect.signature(getattr(kljax, call.function)).parameters
        }
        renamed = {name for call, _ in steps(entry.call) for name in call.renamed.values()}
        assert set(entry.sources) <= known | renamed | BESIDE


def test_each_name_has_one_entry() -> None:
    assert [
        key
        for key, number in Counter((entry.kind, entry.system, entry.name) for entry in ENTRIES).items()
        if number > 1
    ] == []


def test_every_recorded_function_is_used_by_a_row() -> None:
    recorded = {(case.system, case.function) for case in cases.all_cases()}
    assert recorded == {(entry.system, golden.function) for entry in ENTRIES for golden in entry.goldens}


@pytest.mark.parametrize("entry", kljax.systems.entries(kind="kl"), ids=key_of)
def test_arguments_of_an_estimator(entry: Entry) -> None:
    if entry.call is None or entry.call.function != "estimate_kl" or entry.call.scale != 1:
        with pytest.raises(ValueError, match=rf"{entry.system}/"):
            kljax.systems.arguments(entry.key, kind="kl")
        return
    lp, ref = jnp.array([[-1.0, -2.0]]), jnp.array([[-2.0, -1.5]])
    arguments = kljax.systems.arguments(entry.key, kind="kl")
    sampling = {"sampling_log_probs": lp} if "sampling_log_probs" in entry.sources else {}
    assert kljax.estimate_kl(lp, ref, jnp.array([[1, 1]]), **arguments, **sampling).shape == (1, 2)
    arguments.clear()
    assert kljax.systems.arguments(entry.key, kind="kl"), "the table can be changed through what a lookup returns"


def test_arguments_lose_no_factor() -> None:
    scaled = [entry for entry in ENTRIES if entry.call is not None and entry.call.scale != 1]
    assert {entry.kind for entry in scaled} > {"kl"}
    for entry in scaled:
        with pytest.raises(ValueError, match=rf"{re.escape(entry.key)} is .*, which arguments of "):
            kljax.systems.arguments(entry.key, kind=entry.kind)


@pytest.mark.parametrize("entry", kljax.systems.entries(kind="reduction"), ids=key_of)
def test_arguments_of_a_reduction(entry: Entry) -> None:
    arguments, mask = kljax.systems.arguments(entry.key, kind="reduction"), jnp.array([[True, False], [True, True]])
    inputs = {"max_length": 2.0, "group_ids": jnp.array([0, 1]), "num_groups": 2}
    sizes = {name: value for name, value in inputs.items() if name in entry.sources}
    weights = kljax.token_weights(mask, **arguments, **sizes)
    assert jnp.all((weights > 0) == mask)


def test_calls_of_the_other_kinds() -> None:
    assert kljax.systems.get("trl/scale_rewards=none").arguments == {"scale": "none"}
    assert kljax.systems.get("trinity/gspo").function == "gspo_loss"
    assert kljax.systems.get("slime/icepop").arguments["mode"] == "mask"
    assert kljax.systems.get("skyrl/fixed").function == "fixed_kl"


def test_rows_are_chosen_by_any_field() -> None:
    assert {entry.system for entry in kljax.systems.entries(name="low_var_kl", kind="kl")} == {
        "trinity",
        "verl",
        "slime",
    }
    assert all(entry.kind == "controller" for entry in kljax.systems.entries(kind="controller"))
    assert kljax.systems.entries(name="no such name") == ()


def test_errors_list_the_known_names() -> None:
    with pytest.raises(ValueError, match=r"system: got 'Verl', expected one of .*verl.* did you mean 'verl'\?"):
        kljax.systems.arguments("Verl/k3", kind="kl")
    with pytest.raises(ValueError, match=r"verl kl: got 'low_var', expected one of .* did you mean 'low_var_kl"):
        kljax.systems.arguments("verl/low_var", kind="kl")
    with pytest.raises(ValueError, match="kind: got 'estimator'"):
        kljax.systems.entries(kind="estimator")
    with pytest.raises(ValueError, match=r"verl/full has no call here: verl raises NotImplementedError"):
        kljax.systems.arguments("verl/full")


def test_lookup_of_every_kind_takes_arrays_by_name() -> None:
    arrays = {"log_probs": jnp.array([[-1.0, -60.0]]), "ref_log_probs": jnp.array([[-2.0, -1.0]])}
    arrays["advantages"] = jnp.ones((1, 2))  # an array of other names: one batch serves all of them
    expected = kljax.estimate_kl(arrays["log_probs"], arrays["ref_log_probs"], estimator="low_var_kl")
    chex.assert_trees_all_equal(kljax.systems.get("verl/low_var_kl")(arrays), expected)
    weights = kljax.systems.get("trl/dapo", kind="reduction")({"mask": jnp.array([[True, False, True]])})
    chex.assert_trees_all_close(weights, jnp.array([[0.5, 0.0, 0.5]]))
    assert kljax.systems.get("verl/fixed")(coef=0.5).init().coef == 0.5
    shaped = kljax.systems.get("verl/vanilla")
    assert shaped.required == ("log_probs", "old_log_probs", "advantages", "mask")
    assert set(shaped.optional) == {"clip_low", "clip_high", "dual_clip"}


@pytest.mark.parametrize(("name", "expected"), [("max", 2.0), ("min", -0.5)])
def test_extreme_of_log_perplexities_is_one_number(name: str, expected: float) -> None:
    rollout = jnp.zeros((3, 2))
    log_probs = jnp.array([[-2.0, -2.0], [0.5, 0.5], [9.0, 9.0]])
    mask = jnp.array([[True, True], [True, True], [False, False]])
    call = kljax.systems.get(f"verl/rollout_corr/log_ppl_diff_{name}")
    largest = call({"log_probs": log_probs, "rollout_log_probs": rollout, "mask": mask})
    chex.assert_trees_all_close(largest, jnp.asarray(expected))
    assert repr(call).endswith(f".{'min' if name == 'max' else 'max'}")


def test_importance_ratio_implied_by_the_name_is_required() -> None:
    arrays = {"log_probs": jnp.array([-1.0]), "ref_log_probs": jnp.array([-2.0])}
    call = kljax.systems.get("slime/k3+use_unbiased_kl")
    with pytest.raises(ValueError, match=r"arrays: got log_probs, ref_log_probs, expected .* add sampling_log_probs"):
        call(arrays)
    sampling = jnp.array([-1.5])
    expected = kljax.estimate_kl(arrays["log_probs"], arrays["ref_log_probs"], sampling_log_probs=sampling)
    chex.assert_trees_all_close(call({**arrays, "sampling_log_probs": sampling}), expected)
    # The same batch gives a name without a ratio the estimate without one.
    plain = kljax.systems.get("slime/k3")({**arrays, "sampling_log_probs": sampling})
    chex.assert_trees_all_close(plain, kljax.estimate_kl(arrays["log_probs"], arrays["ref_log_probs"]))


def test_mistakes_in_a_call_name_the_argument() -> None:
    call, arrays = kljax.systems.get("verl/low_var_kl"), {"log_probs": jnp.zeros(1), "ref_log_probs": jnp.zeros(1)}
    with pytest.raises(ValueError, match=r"arrays: got nothing, expected log_probs, ref_log_probs \(optional: mask\)"):
        call({})
    with pytest.raises(ValueError, match=r"arrays: got 'log_prob', expected .* did you mean 'log_probs'"):
        call({**arrays, "log_prob": 1})
    with pytest.raises(ValueError, match=r"arguments of estimate_kl: got 'estimate', .* did you mean 'estimator'"):
        call(arrays, estimate="k1")
    with pytest.raises(ValueError, match="arrays: got log_probs as an argument as well; pass it once"):
        call(arrays, log_probs=arrays["log_probs"])


def test_a_name_of_several_kinds_needs_the_kind() -> None:
    with pytest.raises(ValueError, match="kind: got None, expected one of reduction, policy_loss, which all have"):
        kljax.systems.get("trl/grpo")
    assert kljax.systems.get("trl/grpo", kind="policy_loss").function == "ppo_clip_loss"


@pytest.mark.parametrize(
    ("name", "suggestion"),
    [
        ("kl_penalty", r"did you mean 'verl/kl', 'verl/k1'.* more: kljax.systems.find\('kl_penalty'\)"),
        ("compute_policy_loss_vanilla", "did you mean 'verl/vanilla'"),
        ("verl/compute_policy_loss_vanila", "did you mean 'verl/vanilla'"),
        ("verl/low_var", "did you mean 'verl/low_var_kl'"),
        ("k3", "did you mean 'trinity/k3'"),
        ("nothing like it", r"search with kljax.systems.find\(text\)"),
    ],
)
def test_an_unknown_name_is_searched_for(name: str, suggestion: str) -> None:
    with pytest.raises(ValueError, match=f"name: got '{name}', expected system/name; {suggestion}"):
        kljax.systems.get(name)


def test_names_are_found_by_system_functions() -> None:
    assert kljax.systems.find("compute_policy_loss_vanilla")[0].key == "verl/vanilla"
    assert [entry.key for entry in kljax.systems.find("kl-penalty")][:3] == ["verl/kl", "verl/k1", "verl/abs"]
    assert kljax.systems.find("verl/low_var_kl")[0].key == "verl/low_var_kl"
    assert "slime/gspo" in {entry.key for entry in kljax.systems.find("gspo_loss")}
    assert kljax.systems.find("nothing like it") == ()


# Arrays that the names of the table ask for, of two rows of four tokens; numbers that only the user can know.
# Of numpy, as all processes import this module: each operation of JAX would be compiled.
TOKENS = np.linspace(-2.0, -0.1, 8, dtype=np.float32).reshape(2, 4)
VOCABULARY = log_softmax(np.sin(np.arange(40, dtype=np.float32)).reshape(2, 4, 5), -1)
ROWS = {name: np.array([1.0, 0.25], np.float32) for name in ("rewards", "baselines")}
GIVEN = {
    **{name: TOKENS * factor for factor, name in enumerate(("log_probs", "old_log_probs", "sampling_log_probs"), 2)},
    **dict.fromkeys(("ref_log_probs", "rollout_log_probs", "teacher_log_probs", "kl", "values"), TOKENS * 1.5),
    **dict.fromkeys(("advantages", "token_rewards", "returns", "old_values", "weights"), TOKENS + 1),
    **dict.fromkeys(("entropies", "expected_scores", "sum_squared_probs"), TOKENS**2),
    **dict.fromkeys(("vocab_log_probs", "teacher_vocab_log_probs"), VOCABULARY),
    **{name: np.sort(VOCABULARY)[..., -2:] for name in ("top_log_probs", "teacher_top_log_probs")},
    **dict.fromkeys(("rejected_log_probs", "rejected_ref_log_probs", "scores"), TOKENS),
    **{name: np.ones((2, 4), bool) for name in ("mask", "rejected_mask")},
    **{name: np.zeros(2, np.int32) for name in ("group_ids", "run_ids")},
    **ROWS,
    "scores": ROWS["rewards"],
    **dict.fromkeys(("preferred", "rejected"), -ROWS["rewards"] - 1),
    "desirable": ROWS["rewards"] > 0,
    "average": ROWS,
    "initial": ROWS,
    "turn_scores": TOKENS[:, :2],
    "scored": TOKENS[:, :2] < 0,
    "turn_ids": np.zeros((2, 4), np.int32),
    "label_smoothing": 0.1,
    "key": jax.random.key(0),
    "steps": (),
    "reference": ROWS,
    "params": ROWS,
    "step": np.int32(1),
    "num_groups": 1,
    "num_runs": 1,
    **dict.fromkeys(("coef", "target", "max_divergence", "max_kl", "tau", "beta"), 0.1),
    **dict.fromkeys(("horizon", "every", "max_length", "shift"), 10),
}
UNBOUNDED = {"lower": 0.5, "upper": 2.0, "max_length": 4.0}


def has_result(call: Call, arrays: dict[str, Any], arguments: dict[str, Any]) -> bool:
    """Whether a call is not None for these arrays. It is traced: the recorded results have the numbers."""
    results: list[Any] = []
    traced = {name: value for name, value in arrays.items() if isinstance(value, np.ndarray | jax.Array)}
    jax.eval_shape(lambda given: results.append(call({**arrays, **given}, **arguments)), traced)
    return results[0] is not None


@pytest.mark.parametrize("kind", KINDS)
def test_every_call_runs_on_its_listed_arrays(kind: str) -> None:
    calls = {}
    for entry in ENTRIES:
        if entry.kind == kind and entry.call:
            call = kljax.systems.get(entry.key, kind=kind)
            calls[repr(call), call.required, call.optional] = entry, call
    for entry, call in calls.values():
        arrays = {name: GIVEN[name] for name in call.required}
        bounds = [name for name in UNBOUNDED if name in call.optional and name not in call.arguments]
        groups = [n for n in ("group_ids", "num_groups") if n in call.optional]
        arguments = {**{n: UNBOUNDED[n] for n in bounds}, **{n: GIVEN[n] for n in groups}}
        if entry.key == "trl/normalize_then_sum" or call.function == "gdpo_advantages":
            arrays["rewards"] = jnp.ones((2, 2))
        if call.function == "broadcast_to_tokens":
            arrays["advantages"] = ROWS["rewards"]
        if call.function == "gae":
            arrays["rewards"] = TOKENS
        if call.function == "reference_kl_loss":  # k1, a default of the systems, has no gradient without a ratio
            arguments["sampling_log_probs"] = TOKENS
        assert has_result(call, arrays, arguments), entry.key


def test_counts() -> None:
    # The numbers of the documentation; an entry that comes or goes changes them.
    names = Counter(entry.system for entry in ENTRIES)
    assert set(names) == set(SYSTEMS)
    assert min(names.values()) >= 15
    without_call = [entry for entry in ENTRIES if entry.call is None]
    assert len(CHECKED) > 250
    assert len(without_call) < 0.15 * len(ENTRIES)


def output(capsys: pytest.CaptureFixture[str], *argv: str) -> str:
    """Returns the text that the command prints, which fits into 100 columns."""
    assert main(["systems", *argv]) == 0
    text, errors = capsys.readouterr()
    assert errors == ""
    assert all(len(line) <= WIDTH for line in text.splitlines()) or "--json" in argv
    return text


def test_overview(capsys: pytest.CaptureFixture[str]) -> None:
    text = output(capsys)
    assert text.startswith(f"{len(ENTRIES)} names of 8 systems")
    assert all(f"\n{key}: {system.title} {system.version}\n" in text for key, system in SYSTEMS.items())


@pytest.mark.parametrize("system", SYSTEMS)
def test_names_of_a_system(system: str, capsys: pytest.CaptureFixture[str]) -> None:
    text = output(capsys, system)
    assert all(entry.name.split("+")[0] in text for entry in kljax.systems.entries(system=system))


@pytest.mark.parametrize("name", sorted({entry.name for entry in ENTRIES}))
def test_details_and_comparison_of_every_name(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    systems = {entry.system for entry in ENTRIES if entry.name == name}
    for text in (output(capsys, name), output(capsys, "--compare", name)):
        assert all(f"{system}/{name}" in text for system in systems)


def test_a_function_of_a_system_finds_its_names(capsys: pytest.CaptureFixture[str]) -> None:
    text = output(capsys, "compute_policy_loss_vanilla")
    assert text.startswith("verl/vanilla (policy loss)")
    assert "verl/low_var_kl (kl)" in output(capsys, "kl_penalty")


@pytest.mark.parametrize("spelling", ["kl_loss_type", "--kl-loss-type", "KL-loss_type", "actor.kl_loss_type"])
def test_option_lists_its_values_and_arguments(spelling: str, capsys: pytest.CaptureFixture[str]) -> None:
    text = output(capsys, spelling)
    start = text.index("verl:        actor.kl_loss_type takes\n")
    listed = [line.split()[0] for line in text[start:].partition("\n\n")[0].splitlines()[1:] if line[2] != " "]
    wanted = [entry.name for entry in kljax.systems.entries(system="verl") if "actor.kl_loss_type" in entry.option]
    assert listed == wanted
    assert "low_var_kl   kljax.estimate_kl(estimator='low_var_kl')" in text
    assert "actor.kl_loss_type sets estimator of use_kl_loss" in text
    assert ("slime:       --kl-loss-type takes" in text) == (spelling != "actor.kl_loss_type")


@pytest.mark.parametrize(
    ("option", "use"),
    [
        ("delta", "trl:         delta sets max_ratio of grpo, bnpo, dr_grpo, dapo, luspo"),
        ("epsilon_high", "trl:         epsilon_high sets clip_high (epsilon_high, else epsilon) of grpo"),
        ("--eps-clip", "openrlhf:    --actor.eps_clip (clip_eps_low) sets clip_low of ppo, gspo"),
        ("--kl_estimator", "openrlhf:    --kl_estimator (--algo.kl.estimator) takes\n  k1 "),
        ("init_kl_coef", "openrlhf:    --init_kl_coef (--algo.kl.init_coef) sets coef of fixed, adaptive"),
        ("token_mask_low", "prime-rl:    token_mask_low sets lower of token_mask"),
        ("clip_ratio_high", "verl:        actor.clip_ratio_high sets clip_high of vanilla"),
    ],
)
def test_option_of_any_release_is_found(option: str, use: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert use in output(capsys, option)


def test_option_with_a_value_shows_its_details(capsys: pytest.CaptureFixture[str]) -> None:
    text = output(capsys, "--kl-loss-type", "low_var_kl")
    assert text.startswith("slime/low_var_kl (kl)")
    assert "\nverl/low_var_kl (kl)" in text
    assert "trinity" not in text.partition("\n")[0]
    described = json.loads(output(capsys, "--kl-loss-type", "--json"))
    assert {"slime", "verl"} == {entry["system"] for entry in described}


def test_words_of_a_description_are_no_options(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["systems", "log-prob"]) == main(["systems", "trainer"]) == 2
    assert "or an option" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        main(["parity", "--kl-loss-type"])


def test_aliases_stand_for_options_of_the_table() -> None:
    for system in SYSTEMS.values():
        for alias, options in system.aliases.items():
            assert {use.option for use in find_option(alias)} >= {*options}, alias


def test_details_of_one_name(capsys: pytest.CaptureFixture[str]) -> None:
    text = output(capsys, "verl/low_var_kl")
    assert "kljax.estimate_kl(estimator='low_var_kl')" in text
    assert "x to [-20, 20], then the value to [-10, 10]" in text
    assert "log_probs, ref_log_probs; optional: mask" in text
    assert "trinity" not in text


def test_comparison_has_the_numbers_of_the_library(capsys: pytest.CaptureFixture[str]) -> None:
    text = output(capsys, "--compare", "k3")
    assert "k3 (kl): 7 meanings in 6 of 8 systems" in text
    assert "trinity/k3, slime/k3, trl/k3" in text
    assert "not in  art, prime-rl" in text
    clamped = next(entry for entry in comparison_as_json("k3") if entry["names"] == ["skyrl/k3", "verl/k3"])
    assert clamped["also"] == ["trinity/low_var_kl", "verl/low_var_kl"]
    at = {point["at"]: (point["value"], point["gradient"]) for point in clamped["points"]}
    assert at["x = -30"] == (10.0, 0.0)
    assert at["x = 1"] == pytest.approx((0.36788, 0.63212), abs=1e-5)


def test_json(capsys: pytest.CaptureFixture[str]) -> None:
    everything = json.loads(output(capsys, "--json"))
    assert len(everything) == len(ENTRIES)
    (entry,) = json.loads(output(capsys, "openrlhf/k3", "--json"))
    assert entry["call"]["arguments"] == {"estimator": "k3", "value_clip": 10.0}
    assert entry["version"] == "0.11.2"
    (part,) = json.loads(output(capsys, "openrlhf/rloo", "--json"))
    assert [step["function"] for step in part["call"]["then"]] == ["subtract_kl", "reinforce_plus_plus_returns"]
    assert "--reward.clip_range" in part["part"]
    compared = json.loads(output(capsys, "--compare", "token-mean", "--json"))
    assert {"kind", "names", "also", "call", "points"} == set(compared[0])


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["nothing-like-it"], "got 'nothing-like-it', expected a system"),
        (["verl/low_var_k"], "did you mean 'verl/low_var_kl'"),
        (["verll"], "did you mean 'verl'"),
        (["--compare", "k33"], "did you mean 'k3'"),
        (["verl", "--compare", "k3"], "give a NAME or --compare NAME, not both"),
    ],
)
def test_mistakes_are_one_line(argv: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["systems", *argv]) == 2
    text, errors = capsys.readouterr()
    assert text == ""
    assert message in errors
    assert errors.count("\n") == 1


def test_as_a_command() -> None:
    command = [sys.executable, "-m", "kljax", "systems", "trinity/corrected_k2"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert "did you mean 'trinity/corrected_k3'" in done.stderr
    assert "Traceback" not in done.stderr
