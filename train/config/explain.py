"""The algorithm of a config in words and formulas, with the place that each field comes from (`--explain`)."""

from collections.abc import Iterator, Mapping
from typing import Any

from train.config.kl import KLTerm, LossKL, RewardKL
from train.config.load import LoadedConfig
from train.config.loss import Advantage, Loss
from train.config.messages import show
from train.config.plan import Plan, advantage_signature, is_on
from train.config.types import Section

REDUCTIONS: Mapping[str, str] = {
    "token_mean": "sum of the tokens / number of tokens of the update",
    "token_sum": "sum of the tokens",
    "seq_mean_token_sum": "mean over the rows of the sum of their tokens",
    "seq_mean_token_mean": "mean over the rows of the mean of their tokens",
    "seq_mean_token_sum_norm": "mean over the rows of the sum of their tokens / max_length",
    "prompt_mean": "mean over the prompts of the mean of their tokens",
}
ESTIMATORS: Mapping[str, str] = {
    "none": "0",
    "k1": "k1 = x",
    "abs": "|x|",
    "k2": "k2 = x^2 / 2",
    "k3": "k3 = exp(-x) - 1 + x",
    "low_var_kl": "k3 = exp(-x) - 1 + x, with x clipped at 20 and k3 at 10",
    "exact": "the KL over the whole vocabulary",
}
"""Estimates of the KL per token, where `x = log policy - log reference`."""
GRADIENTS: Mapping[str, str] = {
    "value": "differentiated itself",
    "k2": "with the gradient of k2, which is that of KL(policy || reference)",
    "weighted_k2": "with the gradient of k2 times the importance weight",
    "none": "a constant",
}


def explain(loaded: LoadedConfig) -> str:
    """Explains advantages, loss, reduction and the placements of the KL, one line for each field and its origin."""
    config = loaded.config
    plan = Plan.of(loaded.config)
    lines = [f"{loaded.source}" + (f" on the preset {config.preset}" if config.preset else "")]
    if plan.advantage is not None:
        lines += ["", f"advantages: {config.advantage.type}", f"  {advantage_signature(config).doc}"]
        lines += _fields(loaded, "advantage", config.advantage, type(config.advantage).model_fields)
    lines += ["", f"policy loss: {config.loss.type}"]
    if plan.loss is not None:
        lines += [f"  {plan.loss.doc}"]
    specific = [name for name in type(config.loss).model_fields if name not in Loss.model_fields]
    lines += _fields(loaded, "loss", config.loss, ["type", *specific])
    lines += ["", f"reduction: {REDUCTIONS[config.loss.aggregation]}"]
    used = ["aggregation"] + (["max_length"] if config.loss.max_length is not None else [])
    lines += _fields(loaded, "loss", config.loss, [*used, "empty_rows"])
    if config.loss.entropy_aggregation is not None:
        lines += ["", f"entropy bonus, reduced by itself: {REDUCTIONS[config.loss.entropy_aggregation]}"]
    for name, term in config.kl.terms().items():
        lines += _kl(loaded, name, term)
    if config.kl.rollout.coef > 0:
        lines += ["", f"KL to the sampler, in the loss: + coef * {ESTIMATORS[config.kl.rollout.estimator]}"]
        lines += _fields(loaded, "kl.rollout", config.kl.rollout, type(config.kl.rollout).model_fields)
    for entry, signature in zip(config.correction, plan.corrections, strict=True):
        options = ", ".join(f"{name} {show(value)}" for name, value in entry.options().items())
        origin = next((of for path, of in loaded.origins.items() if path.startswith("correction")), "default")
        lines += ["", f"correction for the sampler: {entry.type} ({origin})", f"  {signature.doc}", f"  {options}"]
    for name, text in (("entropy_coef", "- entropy_coef * entropy"), ("value_coef", "+ value_coef * value loss")):
        if getattr(config.loss, name) > 0 or (name == "entropy_coef" and config.loss.has_entropy_term()):
            lines += ["", f"in the loss: {text}", *_fields(loaded, "loss", config.loss, [name])]
    if "entropy" in plan.moving:
        controller = config.loss.entropy_controller
        lines += _fields(loaded, "loss.entropy_controller", controller, type(controller).model_fields)
    return "\n".join(lines)


def _kl(loaded: LoadedConfig, name: str, term: KLTerm) -> Iterator[str]:
    """Yields the lines of a placement; one line if it is off."""
    noun = {"reward": "reward", "loss": "loss", "advantage": "advantages"}[name]
    yield ""
    if not is_on(term):
        yield f"KL to the reference, in the {noun}: none"
        yield from _fields(loaded, f"kl.{name}", term, ["coef"])
        return
    estimate = ESTIMATORS[term.estimator]
    if isinstance(term, LossKL):
        of = {"token": "", "sequence": " of the sequence", "geometric": " of the sequence, a geometric mean"}
        corrected = f"importance ratio{of[term.importance_level]} * " if term.importance_corrected else ""
        yield f"KL to the reference, in the loss: + coef * {corrected}{estimate}, {GRADIENTS[term.gradient]}"
        if term.aggregation is not None:
            yield f"  reduced by itself: {REDUCTIONS[term.aggregation]}"
    elif isinstance(term, RewardKL):
        yield f"KL to the reference, in the reward of each token: - coef * {estimate}"
    else:
        yield f"KL to the reference, in the advantages: + coef * (mean - {estimate})"
    yield from _fields(loaded, f"kl.{name}", term, [key for key in type(term).model_fields if key != "controller"])
    yield from _fields(loaded, f"kl.{name}.controller", term.controller, type(term.controller).model_fields)


def _fields(loaded: LoadedConfig, path: str, section: Section | Advantage, names: Any) -> Iterator[str]:
    """Yields `path = value (origin)` of some fields of a section."""
    for name in names:
        field = f"{path}.{name}"
        value = getattr(section, name)
        if not isinstance(value, Section):
            yield f"  {field} = {show(value).strip(chr(39))} ({loaded.origins.get(field, 'default')})"
