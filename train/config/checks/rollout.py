"""Where completions come from: what a source would ignore, and what it needs."""

from collections.abc import Iterator
from pathlib import Path

from train.config.address import url_problem, without_password
from train.config.checks.functions import function_problems
from train.config.checks.problem import Problem, changed, problem
from train.config.mesh import ROW_AXES
from train.config.plan import Plan
from train.config.schema import Config

SAMPLING = ("top_k", "top_p", "min_p", "stop")
MOST_STOPS = 4
"""What the API of OpenAI allows, and vLLM too."""


def _ignored(config: Config) -> Iterator[Problem]:
    section = config.rollout
    kind = section.source.type
    ignored = {
        "jax": ("ahead",),
        "openai": ("slots", "record_kept_tokens"),
        "file": (*SAMPLING, "slots", "record_kept_tokens", "policy_lag", "ahead", "record"),
        "custom": ("ahead",),
    }[kind]
    for name, value, default in changed(section, ignored):
        off = "false" if default is False else {None: "null", (): "[]"}.get(default, default)
        shown = list(value) if isinstance(value, tuple) else value
        yield problem(
            f"got {shown!r}, but rollout.source.type {kind} does not use it; leave it at {off}",
            f"rollout.{name}",
            "rollout.source.type",
        )


def _file(config: Config) -> Iterator[Problem]:
    source = config.rollout.source
    if source.type == "file" and not Path(source.path).exists():
        yield problem(f"got {source.path!r}, but there is no such file or directory", "rollout.source.path")


def _server(config: Config) -> Iterator[Problem]:
    section = config.rollout
    source = config.rollout.source
    if source.type != "openai":
        return
    if reason := url_problem(source.url):
        yield problem(f"got {without_password(repr(source.url))}, but {reason}", "rollout.source.url")
    if source.sync == "lora" and config.lora is None:
        yield problem(
            "got lora, but there is no lora section, so there is no adapter to load; expected weights or none",
            "rollout.source.sync",
            "lora",
        )
    if source.sync == "none" and source.folder is not None:
        yield problem(
            f"got {source.folder!r}, but rollout.source.sync none writes nothing; set it to null",
            "rollout.source.folder",
            "rollout.source.sync",
        )
    if source.api_key_env is not None and source.api_key_file is not None:
        yield problem(
            f"got {source.api_key_file!r}, but rollout.source.api_key_env is set too; set only one of them",
            "rollout.source.api_key_file",
            "rollout.source.api_key_env",
        )
    if len(section.stop) > MOST_STOPS:
        yield problem(
            f"got {len(section.stop)} texts, but servers take at most {MOST_STOPS}",
            "rollout.stop",
            "rollout.source.type",
        )


def _slots(config: Config) -> Iterator[Problem]:
    slots, sampling = config.rollout.slots, config.rollout.mesh
    parts = config.mesh.parts(ROW_AXES) if sampling is None else sampling.parts(config.mesh)
    if slots is not None and slots % parts.count:
        line = f"got {slots}, expected a multiple of {parts}, over which rows are split"
        yield problem(line, "rollout.slots", *parts.fields)


def _kept_tokens(config: Config) -> Iterator[Problem]:
    section = config.rollout
    if section.record_kept_tokens and section.source.type == "jax" and section.top_k == 0:
        yield problem(
            "got true, but rollout.top_k is 0, and it bounds the number of recorded tokens; set rollout.top_k",
            "rollout.record_kept_tokens",
            "rollout.top_k",
        )
    if section.record_kept_tokens and Plan.of(config).sum_squared_probs:
        yield problem(
            "got true, but the advantage estimator reads the squared probabilities of the whole vocabulary; set it to "
            "false, or choose another advantage.type",
            "rollout.record_kept_tokens",
            "advantage.type",
        )


def _user_source(config: Config) -> Iterator[Problem]:
    source = config.rollout.source
    if source.type == "custom":
        name, arguments = "rollout.source.function", "rollout.source.arguments"
        yield from function_problems(source.function, source.arguments, name, arguments, supplied=("context",))


CHECKS = (_ignored, _file, _user_source, _server, _slots, _kept_tokens)
