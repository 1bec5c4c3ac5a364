"""Train/rollout correction weights against the recorded results of verl."""

import kljax
from tests.goldens import cases


@cases.parametrize(("verl", "compute_rollout_correction_weights"))
def test_truncated_importance_weights(case: cases.Case) -> None:
    # verl clips log-ratios at +-20 first, which a threshold of at most 2 makes invisible from above.
    weights = kljax.truncated_importance_weights(
        case.given("log_probs"),
        case.given("rollout_log_probs"),
        case.given("mask"),
        level=case.params["rollout_is"],
        max_weight=case.params["rollout_is_threshold"],
    )
    case.assert_matches(weights, case.result("weights"))
