"""Every recorded case is either compared by some test or left out for a reason that stands here."""

import importlib
import pathlib

from tests.goldens import cases

LATER = "a policy loss that the library does not have yet"
NOT_COVERED = {
    ("verl", "compute_policy_loss_dppo_tv"): LATER,
    ("verl", "compute_policy_loss_dppo_kl"): LATER,
    ("verl", "compute_policy_loss_sapo"): LATER,
    ("verl", "compute_policy_loss_geo_mean"): LATER,
    ("verl", "compute_policy_loss_gpg"): LATER,
    ("verl", "compute_offpolicy_metrics"): "perplexities and chi-squared metrics that the library does not have yet",
}
COVERED, LEFT_OUT = 526, 55


def test_every_case_is_compared_or_left_out_for_a_reason() -> None:
    for path in sorted(pathlib.Path(__file__).parent.glob("test_goldens_*.py")):
        importlib.import_module(f"tests.kljax.{path.stem}")
    shared = [case for case in cases.all_cases() if case.file == cases.SHARED]
    left_out = {case.id for case in shared if (case.system, case.function) in NOT_COVERED}
    everything = {case.id for case in shared}
    assert not cases.CLAIMED & left_out, "a case that a test compares is listed as left out"
    assert everything - cases.CLAIMED - left_out == set(), "a case is neither compared nor left out"
    assert (len(cases.CLAIMED), len(left_out)) == (COVERED, LEFT_OUT)
    assert len(everything) == COVERED + LEFT_OUT


def test_every_reason_is_about_recorded_cases() -> None:
    assert set(NOT_COVERED) <= {(case.system, case.function) for case in cases.all_cases()}
