"""The corrections for the mismatch of trainer and sampler."""

from collections.abc import Iterator

from train.config.checks.problem import Problem, problem
from train.config.plan import Plan, is_on
from train.config.schema import Config

BOUNDS = (("lower", "upper"), ("min_ratio", "max_ratio"))
"""Names of the lowest and the highest value, of which a function needs at least one."""


def _bounds(config: Config) -> Iterator[Problem]:
    """Checks what the functions would raise when the run has started."""
    for number, entry in enumerate(config.correction):
        path = f"correction[{number}]"
        options = entry.options()
        mode = options.get("mode")
        low, high = next((names for names in BOUNDS if options.keys() >= set(names)), ("", ""))
        if not low:
            continue
        lowest = options[low]
        highest = options[high]
        if mode == "truncate" and lowest is not None:
            text = f"got {lowest:g}, but mode truncate has no lower bound; set mode=clip or mode=mask, or null"
            yield problem(text, f"{path}.{low}")
        if mode != "truncate" and lowest is None and highest is None:
            what = entry.type if mode is None else f"mode {mode}"
            yield problem(f"got null for {low} and {high}, but {what} needs a bound; set at least one", path)
        if None not in (lowest, highest) and lowest > highest:
            yield problem(f"got {lowest:g}, expected at most {high} = {highest:g}", f"{path}.{low}")


def _recorded(config: Config) -> Iterator[Problem]:
    """Checks that the log-probs that a correction reads are recorded."""
    readers = {
        "correction": bool(config.correction),
        "loss.old_log_probs": config.loss.old_log_probs == "sampler",
        "rollout.mismatch_by_position": config.rollout.mismatch_by_position > 0,
    }
    off = {"correction": "[]", "loss.old_log_probs": "trainer", "rollout.mismatch_by_position": "0"}
    for name in (name for name, reads in readers.items() if reads and not config.rollout.record_log_probs):
        yield problem(
            f"got false, but {name} reads the log-probs that the sampler records; set true, or {name}={off[name]}",
            "rollout.record_log_probs",
            name,
        )


def _weights(config: Config) -> Iterator[Problem]:
    """Checks that weights have a policy term to multiply, which does not have that ratio already."""
    plan = Plan.of(config)
    chosen = config.loss.type
    for number, signature in enumerate(plan.corrections):
        entry = config.correction[number]
        path = f"correction[{number}]"
        if "advantages" in signature and plan.advantage is None:
            text = f"got {entry.type}, which reads advantages, but loss.type {chosen} uses none; remove the entry"
            yield problem(text, path, "loss.type")
        if signature.returns != "Float":
            continue
        if plan.loss is None:
            text = f"got {entry.type}, whose weights multiply the policy term, but loss.type is none; remove the entry"
            yield problem(text, path, "loss.type")
        elif config.loss.old_log_probs == "sampler" and "old_log_probs" in plan.loss:
            text = (
                f"got {entry.type}, but with loss.old_log_probs sampler the ratio of loss.type {chosen} is to the "
                "sampler already; remove the entry, or set loss.old_log_probs=trainer"
            )
            yield problem(text, path, "loss.old_log_probs", "loss.type")


def _lags(config: Config) -> Iterator[Problem]:
    """Checks that the lags that a correction reads are known."""
    source = config.rollout.source
    for number, signature in enumerate(Plan.of(config).corrections):
        if "lags" not in signature:
            continue
        path = f"correction[{number}]"
        kind = config.correction[number].type
        if source.type == "file" and source.shuffle:
            text = (
                f"got {kind}, which reads the lag of each token, but shuffled rows of a recording have none; set "
                "rollout.source.shuffle=false, or remove the entry"
            )
            yield problem(text, path, "rollout.source.shuffle")
        if source.type == "openai" and source.sync == "none":
            text = (
                f"got {kind}, which reads the lag of each token, but with rollout.source.sync none nobody knows it; "
                "remove the entry"
            )
            yield problem(text, path, "rollout.source.sync")


def _unused(config: Config) -> Iterator[Problem]:
    """Checks for fields that change nothing."""
    plan = Plan.of(config)
    loss = config.loss
    if loss.rejected_tokens != "drop" and not config.correction:
        text = "got count, but correction is empty, so nothing is rejected; leave it at drop"
        yield problem(text, "loss.rejected_tokens", "correction")
    corrected_kl = is_on(config.kl.loss) and config.kl.loss.importance_corrected
    if loss.old_log_probs == "sampler" and not (plan.loss and "old_log_probs" in plan.loss) and not corrected_kl:
        text = f"got sampler, but loss.type {loss.type} has no ratio to an old policy; leave it at trainer"
        yield problem(text, "loss.old_log_probs", "loss.type")


CHECKS = (_bounds, _recorded, _weights, _lags, _unused)


def warnings(config: Config) -> Iterator[str]:
    """Warns of completions of another policy that nothing corrects for."""
    section = config.rollout
    if Plan.of(config).rollout_log_probs:
        return
    other = None
    if section.policy_lag > 0:
        other = f"rollout.policy_lag: completions come from the policy of {section.policy_lag} steps ago"
    elif section.ahead > 0:
        steps = "1 step" if section.ahead == 1 else f"{section.ahead} steps"
        other = f"rollout.ahead: completions come from the policy of {steps} ago"
    elif section.source.type not in ("jax", "endpoint"):
        other = f"rollout.source.type: {section.source.type} samples outside of this process"
    if other is not None:
        entry = "correction=[{type: truncated_importance_weights}]"
        yield f"{other}, and nothing corrects for the mismatch with the trainer; set {entry} or kl.rollout.coef"
