"""Faults of dumps from outside are named, a few here; all of them with `python -m tests.parity_trial`."""

import pathlib

import pytest

from tests.parity_outside.write import read_cases
from tests.parity_trial import score

ROOT = pathlib.Path(__file__).parents[3] / "parity_outside"
NAMED = (
    "log-ratio-clip-trl_grpo",
    "correction-twice-slime_tis",
    "gradient-norm-trl_dapo",
    "divisor-eps-trinity_ppo",
    "kl-reward-mask-openrlhf_reinforce",
    "reduction-root-length-slime_tis",
)
# Of the second list: a row that moved, and a search whose candidates overflow, where a warning is an error.
NAMED_LATER = ("reference-rows-moved-verl_ppo", "center-others-trl_dr_grpo")
# Of the third list: advantages of other rows, a bound that the system's loss has, and causes with names of their own.
NAMED_LAST = (
    "advantages-rows-trl_gspo",
    "log-ratio-clip-verl_tis",
    "reference-is-policy-trl_dr_grpo",
    "mask-all-trl_dapo",
    "ratio-of-row-trl_dapo",
    "ratio-constant-trinity_ppo",
    "micro-batches-not-verl_ppo",
    "kl-ratio-slime_tis",
    "pair-correction-off+kl-verl_tis",
    # Families of causes that the third list added to the search.
    "top-logits-trl_grpo",
    "no-pad-logit-verl_ppo",
    "reference-rows-reversed-verl_tis",
    "kl-offset-trl_grpo",
    "kl-reward-both-verl_ppo",
    "center-best-slime_tis",
    "scale-std-of-centered-trl_grpo",
    "overlong-penalty-trl_dr_grpo",
    "advantages-positive-verl_tis",
    "whitening-scale-verl_rpp",
    "log-ratio-factor-verl_ppo",
    "ratio-product-trl_gspo",
    "ipo-prime_default",
    "cispo-masked-trl_cispo",
    "cispo-gradient-art_cispo",
    "sequence-mask-trl_dapo",
    "gradient-last-micro-batch-verl_tis",
)
# Of the fourth list: one of each family of causes that it added to the search.
NAMED_FOURTH = (
    "mask-last-turn-trl_dr_grpo",
    "mask-without-tool-answer-verl_ppo",
    "rewards-as-ranks-slime_tis",
    "overlong-buffer-verl_tis",
    "groups-cut-by-micro-batches-skyrl_cispo",
    "advantage-on-last-token-trl_dapo",
    "returns-not-reversed-openrlhf_reinforce",
    "old-missing-in-first-micro-batch-trl_dapo",
    "bfloat16-log-ratio-trinity_ppo",
    "ratio-mean-of-ratios-trl_gspo",
    "veto-slime_tis",
    "weights-of-prefix-skyrl_cispo",
    "weights-reject-trl_grpo",
    "kl-ratio-of-row-trl_dapo",
    "kl-of-row-skyrl_dual",
    "dual-clip-both-signs-trinity_ppo",
    "divisor-no-end-trl_gspo",
    "gradient-norm-of-micro-batch-verl_rpp",
)
# Of the fifth list: one of each family of causes that it added to the search.
NAMED_FIFTH = (
    "micro-batch-means-skyrl_cispo",
    "rank-means-prime_default",
    "end-token-left-in-divisor-verl_tis",
    "remainder-of-micro-batches-skyrl_cispo",
    "rows-repeated-verl_ppo",
    "loss-logged-unscaled-trl_cispo",
    "mask-from-longest-prompt-openrlhf_k2",
    "sampler-without-end-trl_grpo",
    "sampler-end-from-trainer-slime_tis",
    "top-p-in-normalizer-trl_cispo",
    "kl-in-reward-verl_ppo",
    "kl-in-loss-verl_rpp",
    "kl-of-trusted-prime_default",
    "whitened-by-rank-verl_rpp",
    "std-of-others-openrlhf_k2",
    "advantages-early-prime_default",
    "dppo-upper-prime_default",
    "log-clip-verl_ppo",
    "row-band-skyrl_cispo",
    "loss-scale-skyrl_dual",
)
# Advantages that rounding alone makes, and ratios beyond the bound of a system.
CLEAN = (
    "clean-equal-rewards-skyrl_cispo",
    "clean-bfloat16-near-rewards-trinity_ppo",
    "clean-far-off-policy-verl_tis",
)
CASES = {case["id"]: case for case in read_cases()}
LATER_CASES = {case["id"]: case for case in read_cases(ROOT / "more_cases.json")}
LAST_CASES = {case["id"]: case for case in read_cases(ROOT / "third_cases.json")}
FIFTH_CASES = {case["id"]: case for case in read_cases(ROOT / "fifth_cases.json")}
FOURTH_CASES = {case["id"]: case for case in read_cases(ROOT / "fourth_cases.json")}


@pytest.mark.parametrize("name", NAMED)
def test_fault_from_outside_is_named(name: str, tmp_path: pathlib.Path) -> None:
    assert score(CASES[name], tmp_path).verdict == "right"


@pytest.mark.parametrize("name", NAMED_LATER)
def test_fault_of_the_second_list_is_named(name: str, tmp_path: pathlib.Path) -> None:
    assert score(LATER_CASES[name], tmp_path).verdict == "right"


@pytest.mark.parametrize("name", [*NAMED_LAST, *CLEAN])
def test_dump_of_the_third_list_is_right(name: str, tmp_path: pathlib.Path) -> None:
    assert score(LAST_CASES[name], tmp_path).verdict == "right"


@pytest.mark.parametrize("name", NAMED_FOURTH)
def test_fault_of_the_fourth_list_is_named(name: str, tmp_path: pathlib.Path) -> None:
    assert score(FOURTH_CASES[name], tmp_path).verdict == "right"


@pytest.mark.parametrize("name", NAMED_FIFTH)
def test_fault_of_the_fifth_list_is_named(name: str, tmp_path: pathlib.Path) -> None:
    assert score(FIFTH_CASES[name], tmp_path).verdict == "right"


def test_stale_reference_is_unknown(tmp_path: pathlib.Path) -> None:
    result = score(CASES["reference-stale-trl_dapo"], tmp_path)
    assert result == ("tied", ("unknown ref_log_probs",))
