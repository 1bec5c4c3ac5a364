"""The dumps are reproducible, the clean ones follow the formulas, and every fault shows where the list says."""

import json
from pathlib import Path

import numpy as np
import pytest

from tests import other_seeds
from tests.parity_outside import second, second_ported, write
from tests.parity_outside.settings import KINDS

PATHS = (write.CASES, *(write.CASES.with_name(f"{name}_cases.json") for name in ("third", "fourth", "fifth")))
LISTS = [write.read_cases(path) for path in PATHS]
CASES = [case for cases in LISTS for case in cases]
CLEAN = [case for case in CASES if case["group"] == "clean"]
PLANTED = [case for case in CASES if case["group"] != "clean"]
README = (Path(__file__).parent / "README.md").read_text()
# Sums of float32 numbers in two orders; bfloat16 dumps are computed in float32 from rounded log-probs.
TOLERANCE = {"float64": 1e-12}
FLOAT32 = 2e-6
# New faults of the later lists without a second formula: settings, or values of them.
UNREPEATED = {
    "mask",
    "loss_mask",
    "reduction",
    "drop_zero_rows",
    "gradient_rows",
    "gradient_norm_parts",
    "whiten_over",
    "reward_column",
    "returns_direction",
    "gae_bootstrap",
    "kl_reward_place",
    "kl_reward_shift",
    "kl_reward_from",
    "kl_centered",
    "ratio_level",
    "masked_steps",
    # The cap of weights that the header does not have.
    "clip",
}


def _name(case):
    return case["id"]


@pytest.fixture(scope="module", params=CLEAN, ids=_name)
def clean(request):
    """A clean case with its header and arrays, all of them, whatever its level."""
    return request.param, *write.make_dump({**request.param, "level": "full"})


def test_loss_clean_equals_second_formula(clean):
    case, header, arrays = clean
    loss, size = second.compute_loss(header, arrays, np.zeros(arrays["mask"].shape))
    assert abs(loss - arrays["loss"]) < TOLERANCE.get(case.get("dtype"), FLOAT32) * size


def test_gradient_clean_equals_finite_differences(clean):
    case, header, arrays = clean
    if "border" in case["id"]:
        return  # A difference is taken across the threshold.
    gradient = arrays["grad_log_probs"].astype(float)
    rng = other_seeds.example(0)
    for _ in range(3):
        direction = rng.normal(size=gradient.shape)
        up, _ = second.compute_loss(header, arrays, 1e-5 * direction)
        down, _ = second.compute_loss(header, arrays, -1e-5 * direction)
        scale = np.abs(gradient * direction).sum()
        assert abs((up - down) / 2e-5 - (gradient * direction).sum()) < 2e-6 * scale


def test_advantages_clean_equal_second_formula(clean):
    case, header, arrays = clean
    expected = second.compute_advantages(header, arrays)
    if expected is None:
        assert header["advantage"]["name"] in ("gae", "reinforce_plus_plus", "reinforce_baseline")
        used = arrays["advantages"][arrays["mask"] > 0]
        # Whitened tokens: mean 0 and variance 1, with n or n - 1 in the divisor.
        ddof = 0 if header["system"] == "openrlhf" else 1
        assert abs(used.mean()) < 1e-6
        # Rewards of 1e-7 leave a variance that the 1e-8 of the whitening shows beside.
        assert abs(used.std(ddof=ddof) - 1) < (1e-4 if np.abs(arrays["rewards"]).max() < 1e-3 else 1e-6)
    else:
        # The noise of a mean in float32, divided by a standard deviation that may be as small.
        deviation = np.abs(arrays["rewards"]).max() / max(np.ptp(arrays["rewards"]), 1e-7)
        noise = 0.0 if case.get("dtype") == "float64" else 4 * np.finfo(np.float32).eps * deviation
        np.testing.assert_allclose(arrays["advantages"], expected, rtol=2e-5 + noise, atol=1e-6 + noise)


def test_log_probs_clean_follow_from_logits(clean):
    case, header, arrays = clean
    if case.get("shape", {}).get("padding") is not None:
        return  # Padding has one number, which is no log-prob of the logits.
    if "rows" not in arrays:
        assert "ref_logits" not in arrays
        return
    tolerance = 2**-8 if case.get("dtype") == "bfloat16" else 1e-6
    for name in ("log_probs", "ref_log_probs"):
        recorded, expected = second.compute_log_probs(header, arrays, name)
        np.testing.assert_allclose(recorded, expected, rtol=tolerance, atol=1e-6)


def test_dumps_written_twice_are_equal(tmp_path):
    for case in CASES[::29]:
        paths = [write.write_dump(case, tmp_path / folder) for folder in _folders(tmp_path)]
        first, again = (np.load(path) for path in paths)
        assert sorted(first.files) == sorted(again.files)
        for name in first.files:
            np.testing.assert_array_equal(first[name], again[name])


def _folders(path):
    for name in ("first", "again"):
        (path / name).mkdir(exist_ok=True)
        yield name


def test_recorded_digest_is_unchanged():
    for path, cases in zip(PATHS, LISTS, strict=True):
        recorded = json.loads(path.read_text())["sizes"]
        for case in cases[::17]:
            fields = write.run_case(case)
            size = float(np.sqrt(sum(np.square(value.astype(float)).sum() for value in fields.values())))
            assert size == pytest.approx(recorded[case["id"]], rel=1e-5)


@pytest.mark.parametrize("case", PLANTED, ids=_name)
def test_fault_planted_shows_first_at_field(case):
    faulty, right = write.run_case(case), write.run_case(case, planted=False)
    recorded = write.SHORT if case.get("level") == "short" else tuple(faulty)
    first = case["first_field"]
    if first is None:
        assert case["group"] == "impossible"
    else:
        assert first in recorded
        assert first not in right or not np.array_equal(faulty[first], right[first])
    for answer in case["answer"]:
        assert f"`{answer['cause_kind']}`" in README
        assert answer["words"]


NEW = [case for case in (*LISTS[2], *LISTS[3]) if case["group"] == "single" and case["new"]]


@pytest.mark.parametrize("case", NEW, ids=_name)
def test_fault_new_follows_second_formula(case):
    ((setting, value),) = case["plant"].items()
    header, arrays = write.make_dump({**case, "level": "full"})
    expected = second_ported.compute_ported(setting, value, header, arrays)
    expected = expected or second.compute_planted(setting, value, header, arrays)
    if not expected:
        assert setting in UNREPEATED or value in UNREPEATED
    for name, numbers in expected.items():
        assert name == case["first_field"]
        known = np.isfinite(numbers)
        assert known.any()
        # A log-ratio that is near the middle between two numbers of bfloat16 may be rounded to either.
        np.testing.assert_allclose(arrays[name][known], numbers[known], rtol=3e-5, atol=3e-6)


def test_answers_name_every_planted_setting():
    for case in CASES:
        kinds = {KINDS[setting] for setting in case.get("plant", {})}
        assert kinds == {answer["cause_kind"] for answer in case["answer"]}


def test_range_of_answer_leaves_dump_unchanged():
    ranged = [(case, answer) for case in LISTS[0] for answer in case["answer"] if "range" in answer]
    assert ranged
    for case, answer in ranged:
        (setting,) = (name for name in case["plant"] if KINDS[name] == answer["cause_kind"])
        low, high = answer["range"]
        inside = 1e-4 * (high - low)
        recorded = write.run_case(case)
        for value, equal in ((low + inside, True), (high - inside, True), (0.97 * low, False), (1.03 * high, False)):
            other = write.run_case({**case, "plant": {**case["plant"], setting: value}})
            assert np.array_equal(other["grad_log_probs"], recorded["grad_log_probs"]) is equal


def test_cases_have_enough_of_each_group():
    for cases, pairs, clean_each in zip(LISTS, (30, 30, 20, 20), (2, 2, 1, 1), strict=True):
        counts = {group: sum(case["group"] == group for case in cases) for group in ("clean", "single", "pair")}
        assert counts["clean"] >= 16
        assert counts["single"] >= 80
        assert counts["pair"] >= pairs
        assert len({case["id"] for case in cases}) == len(cases)
        for setup in write.SETUPS:
            assert sum(case["setup"] == setup and case["group"] == "clean" for case in cases) >= clean_each
    # The fifth list has faults as often as they occur, new or not.
    for cases in LISTS[1:3]:
        singles = [case for case in cases if case["group"] == "single"]
        assert sum(case["new"] for case in singles) >= len(singles) / 2


def _tied_cases():
    """Each case of the later lists with a fault replaced by a cause that is said to tie: its possible settings."""
    for case in [case for cases in LISTS[1:] for case in cases]:
        for setting in case.get("plant", {}):
            answer = next(entry for entry in case["answer"] if entry["cause_kind"] == KINDS[setting])
            for other in answer.get("also", ()):
                # A temperature of all models has two names.
                if (setting, other["cause_kind"]) == ("temperature", "reference_temperature"):
                    continue
                rest = {key: value for key, value in case["plant"].items() if key != setting}
                value = {other["field"]: other["true"]} if "field" in other else other["true"]
                names = [name for name, kind in KINDS.items() if kind == other["cause_kind"]]
                yield case, [{**case, "plant": rest | {name: value}} for name in names]


def test_ties_leave_the_same_numbers():
    for case, others in _tied_cases():
        recorded = write.run_case(case)
        if case.get("level") == "short":
            recorded = {name: value for name, value in recorded.items() if name in write.SHORT}
        assert any(_equal(recorded, write.run_case(other)) for other in others)


def _equal(recorded, fields):
    return all(name in fields and _gap(recorded, fields, name) <= 1e-5 for name in recorded)


def _gap(recorded, fields, name):
    """The largest difference over the largest number, on the tokens that one of the masks has."""
    left, right = fields[name], recorded[name]
    if left.shape != right.shape:
        return np.inf
    if name != "mask" and left.shape == recorded["mask"].shape:
        used = (recorded["mask"] + fields["mask"]) > 0
        left, right = left[used], right[used]
    return np.abs(left - right).max() / max(np.abs(right).max(), 1e-30)
