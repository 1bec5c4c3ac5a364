"""The limits of the guard, which need their metrics, and the checkpoints that are kept."""

from collections.abc import Iterator

from train.config.checks.problem import Problem, changed, problem
from train.config.plan import Plan
from train.config.schema import Config


def _limits(config: Config) -> Iterator[Problem]:
    """Checks that the KL of a limit that was set is measured, and that no field is set that no limit uses."""
    guard = config.guard
    plan = Plan.of(config)
    set_fields = {name for name, _, _ in changed(guard, ("action", "learning_rate_factor", "max_actions"))}
    measured = plan.ref_log_probs or (plan.exact_kl and config.kl.loss.direction == "reverse")
    rollout_kl = config.kl.rollout.coef > 0
    for name, value, _ in changed(guard, ("max_kl", "max_token_kl")):
        if value is not None and not measured and not (name == "max_token_kl" and rollout_kl):
            text = f"got {value:g}, but no KL to the reference is measured; set reference.monitor=true"
            yield problem(text, f"guard.{name}", "reference.monitor")
    limited = (measured and guard.max_kl is not None) or ((measured or rollout_kl) and guard.max_token_kl is not None)
    if not limited and guard.min_entropy is None and "action" in set_fields:
        fix = "guard.max_kl or guard.min_entropy" if measured else "reference.monitor=true or guard.min_entropy"
        text = f"got {guard.action}, which answers a limit, but there is none; set {fix}"
        yield problem(text, "guard.action")
    if guard.action != "lower_learning_rate" and "learning_rate_factor" in set_fields:
        text = f"got {guard.learning_rate_factor:g}, which guard.action {guard.action} does not use; remove it"
        yield problem(text, "guard.learning_rate_factor", "guard.action")
    if guard.action not in ("roll_back", "lower_learning_rate") and "max_actions" in set_fields:
        text = f"got {guard.max_actions}, which guard.action {guard.action} does not use; remove it"
        yield problem(text, "guard.max_actions", "guard.action")


def _kept_steps(config: Config) -> Iterator[Problem]:
    """Checks that there are checkpoints at the steps to keep."""
    section = config.checkpoint
    if section.keep_every is not None and section.keep_every % section.every:
        text = f"got {section.keep_every}, expected a multiple of checkpoint.every, {section.every}"
        yield problem(text, "checkpoint.keep_every", "checkpoint.every")


def _emergency(config: Config) -> Iterator[Problem]:
    """Checks that there are slices with whole states, one of which has the memory of another."""
    section = config.checkpoint.emergency
    mesh = config.mesh
    if section is None:
        return
    if mesh.slices < 2 or mesh.slice_axis != "data" or mesh.data != mesh.slices:
        text = (
            f"got a section with mesh.slices = {mesh.slices} and mesh.data = {mesh.data}, expected two slices or more "
            "with one copy of the state each: set mesh.data to mesh.slices, or leave it out"
        )
        yield problem(text, "checkpoint.emergency", "mesh.slices", "mesh.data")
    if section.every >= config.checkpoint.every:
        text = f"got {section.every}, expected less than checkpoint.every = {config.checkpoint.every}"
        yield problem(text, "checkpoint.emergency.every", "checkpoint.every")
    if config.rollout.ahead:
        text = f"got a section with rollout.ahead = {config.rollout.ahead}, whose batches are in checkpoints alone"
        yield problem(f"{text}; set 0, or leave it out", "checkpoint.emergency", "rollout.ahead")


CHECKS = (_limits, _kept_steps, _emergency)
