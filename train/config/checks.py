"""What must hold between fields. A field that would be ignored is a problem too, not a surprise later."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

from train.config.schema import Config
from train.tokenizer import ByteTokenizer

GROUP_ESTIMATORS = ("grpo", "rloo", "opo", "reinforce_plus_plus_baseline")


class Problem(NamedTuple):
    """A line, and the fields it rests on."""

    fields: tuple[str, ...]
    text: str


def cross_field_problems(config: Config) -> list[Problem]:
    """Everything wrong with the combination of fields that are each valid."""
    return [problem for check in _CHECKS for problem in check(config)]


def cross_field_warnings(config: Config) -> list[str]:
    """Combinations that run, but hardly do what was meant."""
    kl = config.kl
    terms = (
        ("kl.reward", kl.reward.coef, kl.reward.estimator),
        ("kl.loss", kl.loss.coef, kl.loss.estimator),
        ("kl.advantage", kl.advantage.coef, kl.advantage.estimator),
    )
    found = [
        f"{path}.estimator: none makes this term 0 although {path}.coef is {coef}"
        for path, coef, estimator in terms
        if coef > 0 and estimator == "none"
    ]
    if config.exact_reward() and not config.exact_loss():
        found.append(
            "kl.reward.estimator: exact charges a token for the KL at later prefixes alone: that at its own does not "
            "depend on the token; kl.loss.estimator=exact with the same coefficient adds it"
        )
    if config.kl.loss.coef > 0 and config.kl.loss.gradient == "none":
        found.append("kl.loss.gradient: none makes the KL part of the reported loss, but it trains nothing")
    return found


def _problem(text: str, *fields: str) -> Problem:
    """A line about the first field."""
    return Problem(fields, f"{fields[0]}: {text}")


def _kl_loss(config: Config) -> Iterator[Problem]:
    loss = config.kl.loss
    if loss.coef > 0 and loss.estimator == "k1" and loss.gradient == "value" and not loss.importance_corrected:
        yield _problem(
            "got k1 with kl.loss.gradient value, which trains on noise: the gradient of log pi - log ref is that of "
            "log pi, and E[grad log pi] = 0 on samples of pi. Set kl.loss.gradient=k2 (the gradient of "
            "KL(pi || ref)), another estimator (k2, k3), or kl.loss.importance_corrected=true",
            "kl.loss.estimator",
            "kl.loss.gradient",
            "kl.loss.coef",
            "kl.loss.importance_corrected",
        )
    if loss.max_ratio is not None and not loss.importance_corrected:
        yield _problem(
            f"got {loss.max_ratio}, but there is no ratio to bound; set null, or kl.loss.importance_corrected=true",
            "kl.loss.max_ratio",
            "kl.loss.importance_corrected",
        )


def _exact(config: Config) -> Iterator[Problem]:
    """The exact KL samples nothing: it has one gradient, and nothing to correct or to bound."""
    loss, reward = config.kl.loss, config.kl.reward
    wrong: list[tuple[str, object, str]] = []
    if loss.estimator == "exact":
        if loss.gradient != "value":
            wrong.append(("loss.gradient", loss.gradient, "is differentiated itself; expected value, or leave it out"))
        if loss.importance_corrected:
            wrong.append(("loss.importance_corrected", "true", "is no mean over drawn tokens; expected false"))
        if loss.value_clip is not None:
            wrong.append(("loss.value_clip", loss.value_clip, "has no outliers of a sample to bound; expected null"))
    if reward.estimator == "exact" and reward.value_clip is not None:
        wrong.append(("reward.value_clip", reward.value_clip, "has no outliers of a sample to bound; expected null"))
    for name, got, reason in wrong:
        estimator = f"kl.{name.partition('.')[0]}.estimator"
        yield _problem(f"got {got}, but {estimator} exact {reason}", f"kl.{name}", estimator)


def _controller(config: Config) -> Iterator[Problem]:
    if config.kl.reward.controller.type == "adaptive" and config.kl.reward.coef == 0:
        yield _problem(
            "got 0 with the adaptive controller, which multiplies it and so never moves it; expected a number > 0",
            "kl.reward.coef",
            "kl.reward.controller",
        )


def _value_head(config: Config) -> Iterator[Problem]:
    loss, estimator = config.loss, config.advantage.estimator
    if config.has_value_head() and loss.value_coef == 0:
        yield _problem(
            "got 0, but advantage.estimator gae learns a value head; expected a number > 0 such as 0.5",
            "loss.value_coef",
            "advantage.estimator",
        )
    if not config.has_value_head():
        for name, value in (("value_coef", loss.value_coef or None), ("value_clip", loss.value_clip)):
            if value is not None:
                off = "0.0" if name == "value_coef" else "null"
                yield _problem(
                    f"got {value}, but advantage.estimator {estimator} has no value head; set it to {off} or use gae",
                    f"loss.{name}",
                    "advantage.estimator",
                )


def _policy_loss(config: Config) -> Iterator[Problem]:
    loss = config.loss
    if loss.dual_clip is not None and loss.policy != "ppo":
        yield _problem(
            f"got {loss.dual_clip}, but only loss.policy ppo has it, not {loss.policy}; set it to null",
            "loss.dual_clip",
            "loss.policy",
        )
    constant = loss.aggregation == "seq_mean_token_sum_norm"
    if constant and loss.max_length is None:
        yield _problem(
            "got null, but loss.aggregation seq_mean_token_sum_norm divides by it; expected an integer >= 1, such as "
            f"data.max_completion_length ({config.data.max_completion_length})",
            "loss.max_length",
            "loss.aggregation",
        )
    if not constant and loss.max_length is not None:
        yield _problem(
            f"got {loss.max_length}, but loss.aggregation {loss.aggregation} does not use it; set it to null",
            "loss.max_length",
            "loss.aggregation",
        )


def _groups(config: Config) -> Iterator[Problem]:
    estimator, samples = config.advantage.estimator, config.rollout.samples_per_prompt
    if estimator in GROUP_ESTIMATORS and samples < 2:
        yield _problem(
            f"got {samples}, but advantage.estimator {estimator} compares the completions of a prompt; expected >= 2",
            "rollout.samples_per_prompt",
            "advantage.estimator",
        )


def _task(config: Config) -> Iterator[Problem]:
    for name, path in (("data.train", config.data.train), ("data.eval", config.data.eval)):
        if config.task == "arithmetic" and path is not None:
            yield _problem(
                f"got {path!r}, but task arithmetic makes its own problems; set task=gsm8k or leave it null",
                name,
                "task",
            )
        if config.task == "gsm8k" and path is None:
            yield _problem(f"missing; task gsm8k needs a file of JSON lines: {name}=PATH", name, "task")
        if config.task == "gsm8k" and path is not None and not Path(path).is_file():
            kind = "it is a directory" if Path(path).is_dir() else "there is no such file"
            yield _problem(f"got {path!r}, expected a file of JSON lines, but {kind}", name, "task")
    problems = (config.data.max_operand + 1) ** 2 * len(config.data.operations)
    if config.task == "arithmetic" and config.eval.prompts > problems // 2:
        yield _problem(
            f"got {config.eval.prompts}, expected at most {problems // 2}, half of the {problems} problems that "
            "data.max_operand and data.operations give",
            "eval.prompts",
            "data.max_operand",
            "data.operations",
            "task",
        )


def _reference(config: Config) -> Iterator[Problem]:
    reference = config.reference
    if reference.source == "adapter" and config.lora is None:
        yield _problem(
            "got adapter, but the model has none; set lora.rank (and lora.alpha, lora.targets) as they were when it "
            "was saved, or use reference.source base, step or checkpoint",
            "reference.source",
            "lora",
        )
    if reference.source == "step" and reference.step > config.steps:
        yield _problem(
            f"got {reference.step}, but the run ends at steps {config.steps}; expected at most that",
            "reference.step",
            "steps",
        )
    if reference.source in ("adapter", "checkpoint"):
        yield from _missing_path("reference.path", reference.path)


def _warm_start(config: Config) -> Iterator[Problem]:
    if config.warm_start.checkpoint is not None:
        yield from _missing_path("warm_start.checkpoint", config.warm_start.checkpoint)


def _missing_path(name: str, path: str) -> Iterator[Problem]:
    if "://" not in path and not Path(path).exists():  # a bucket is looked into when it is opened
        yield _problem(f"got {path!r}, expected a saved checkpoint, but there is no such path", name)


def _rows(config: Config) -> Iterator[Problem]:
    optim, shards = config.optim, config.mesh.data * config.mesh.fsdp
    rows, parts = config.rows_per_batch(), optim.updates_per_batch * optim.micro_batches
    batch = f"rollout.prompts_per_step x rollout.samples_per_prompt = {rows}"
    rests_on = (
        "optim.micro_batches",
        "optim.updates_per_batch",
        "rollout.prompts_per_step",
        "rollout.samples_per_prompt",
    )
    if rows % parts:
        yield _problem(
            f"{batch} rows do not divide into optim.updates_per_batch x optim.micro_batches = {parts} equal parts",
            *rests_on,
        )
    elif (rows // parts) % shards:
        yield _problem(
            f"a micro-batch has {rows // parts} rows ({batch}, in {parts} parts), expected a multiple of "
            f"mesh.data x mesh.fsdp = {shards}",
            *rests_on,
            "mesh",
        )


def _divisions(config: Config) -> Iterator[Problem]:
    model, mesh = config.model, config.mesh
    divisions = (
        ("model.heads", model.heads, "model.kv_heads", model.kv_heads),
        ("model.heads", model.heads, "mesh.tensor", mesh.tensor),
        ("model.kv_heads", model.kv_heads, "mesh.tensor", mesh.tensor),
        ("model.mlp_width", model.mlp_width, "mesh.tensor", mesh.tensor),
        ("model.width", model.width, "mesh.fsdp", mesh.fsdp),
        ("warm_start.batch_size", config.warm_start.batch_size, "mesh.data x mesh.fsdp", mesh.data * mesh.fsdp),
        ("eval.batch_size", config.eval.batch_size, "mesh.data x mesh.fsdp", mesh.data * mesh.fsdp),
    )
    for name, value, by, divisor in divisions:
        if value % divisor:
            yield _problem(f"got {value}, expected a multiple of {by} = {divisor}", name, *by.split(" x "))
    vocabulary = ByteTokenizer().vocab_size
    if vocabulary % mesh.tensor:
        yield _problem(f"got {mesh.tensor}, expected a divisor of the vocabulary of {vocabulary}", "mesh.tensor")


_CHECKS: tuple[Callable[[Config], Iterator[Problem]], ...] = (
    _kl_loss,
    _exact,
    _controller,
    _value_head,
    _policy_loss,
    _groups,
    _task,
    _reference,
    _warm_start,
    _rows,
    _divisions,
)
