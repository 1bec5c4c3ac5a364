"""Where completions come from: what a source would ignore, and what it needs."""

from collections.abc import Iterator
from pathlib import Path

from train.config.address import is_loopback, url_problem, without_password
from train.config.checks.functions import function_problems
from train.config.checks.problem import Problem, changed, problem
from train.config.mesh import ROW_AXES
from train.config.plan import ADVANTAGE_ARRAYS, LOSS_ARRAYS, Plan, arrays_of
from train.config.rollout import EndpointSourceSection, OpenAISourceSection
from train.config.schema import Config
from train.config.signatures import find_definition
from train.config.storage import is_address
from train.config.types import SYNCS

SAMPLING = ("top_k", "top_p", "min_p", "stop")
AGENT_ARGUMENTS = ("row", "base_url", "api_key", "model")
"""What an agent program gets."""
PER_EPISODE = {"rewards", "group_ids"}
"""Arrays of estimators that give an episode one advantage, whatever rows it has."""
MOST_STOPS = 4
"""What the API of OpenAI allows, and vLLM too."""


def _ignored(config: Config) -> Iterator[Problem]:
    section = config.rollout
    kind = section.source.type
    ignored = {
        "jax": ("ahead",),
        "openai": ("slots", "record_kept_tokens"),
        "file": (*SAMPLING, "slots", "record_kept_tokens", "policy_lag", "ahead", "record"),
        "endpoint": ("slots", "record_kept_tokens", "ahead"),
        "custom": (),
    }[kind]
    for name, value, default in changed(section, ignored):
        off = "false" if default is False else {None: "null", (): "[]"}.get(default, default)
        shown = list(value) if isinstance(value, tuple) else value
        reason = "does not use it"
        if name == "ahead":
            reason = (
                "has nothing in flight"
                if kind == "file"
                else "cannot sample while the devices update; set rollout.policy_lag for samples of an earlier policy"
            )
            if config.runs_episodes():
                reason += ", or a source of yours whose episodes run on other devices"
        yield problem(
            f"got {shown!r}, but rollout.source.type {kind} {reason}; leave it at {off}",
            f"rollout.{name}",
            "rollout.source.type",
        )


def _file(config: Config) -> Iterator[Problem]:
    source = config.rollout.source
    if source.type == "file" and not is_address(source.path) and not Path(source.path).exists():
        yield problem(f"got {source.path!r}, but there is no such file or directory", "rollout.source.path")


def _evaluation(config: Config) -> Iterator[Problem]:
    if config.eval.prompts and config.eval.source == "rollout" and config.rollout.source.type == "file":
        text = "got rollout, but a recording does not complete held-out prompts; set jax, or eval.prompts=0"
        yield problem(text, "eval.source", "rollout.source.type")


def _server(config: Config) -> Iterator[Problem]:
    section = config.rollout
    source = config.rollout.source
    if source.type != "openai":
        return
    yield from _addresses(source)
    if source.sync == "lora" and config.lora is None:
        yield problem(
            "got lora, but there is no lora section, so there is no adapter to load; expected weights or none",
            "rollout.source.sync",
            "lora",
        )
    sync = source.chosen_sync(adapter=config.lora is not None)
    if source.in_flight == "keep" and sync in ("lora", "none"):
        line = f"got keep, but sync is {sync}, which leaves the weights of requests as they are; leave it out"
        yield problem(line, "rollout.source.in_flight", "rollout.source.sync")
    if source.sync not in (None, "lora", "weights") and source.folder is not None:
        yield problem(
            f"got {source.folder!r}, but rollout.source.sync {source.sync} writes nothing; set it to null",
            "rollout.source.folder",
            "rollout.source.sync",
        )
    yield from _two_keys(source, "api_key")
    if len(section.stop) > MOST_STOPS:
        yield problem(
            f"got {len(section.stop)} texts, but servers take at most {MOST_STOPS}",
            "rollout.stop",
            "rollout.source.type",
        )


def _two_keys(source: OpenAISourceSection | EndpointSourceSection, name: str) -> Iterator[Problem]:
    variable = f"rollout.source.{name}_env"
    file = getattr(source, f"{name}_file")
    if file is not None and getattr(source, f"{name}_env") is not None:
        yield problem(
            f"got {file!r}, but {variable} is set too; set only one of them", f"rollout.source.{name}_file", variable
        )


def _addresses(source: OpenAISourceSection) -> Iterator[Problem]:
    url, urls, router = (f"rollout.source.{name}" for name in ("url", "urls", "router"))
    named = [(url, source.url), *((urls, address) for address in source.urls), (router, source.router)]
    for field, address in named:
        if address is not None and (reason := url_problem(address)):
            yield problem(f"got {without_password(repr(address))}, but {reason}", field)
    if source.url is None and not source.urls:
        yield problem("missing; set it to the address of the server, or list several in rollout.source.urls", url)
    if source.url is not None and source.urls:
        yield problem("got a list, but rollout.source.url is set too; set only one of them", urls, url)
    addresses = [address.rstrip("/") for address in source.urls]
    if repeated := next((address for address in addresses if addresses.count(address) > 1), None):
        yield problem(f"got {without_password(repeated)} twice; list each server once", urls)
    if source.router is not None and not source.urls:
        yield problem("needs rollout.source.urls, the servers behind it, to which weights are sent", router, urls)
    if source.router is not None and source.router.rstrip("/") in addresses:
        yield problem("is one of rollout.source.urls; set it to the address in front of them, or to null", router, urls)
    if source.on_engine_failure != "stop" and not source.urls:
        yield problem(
            f"got {source.on_engine_failure}, but there is one server; list several in rollout.source.urls",
            "rollout.source.on_engine_failure",
            urls,
        )
    if source.sync is not None and source.sync not in SYNCS:
        field = "rollout.source.sync"
        yield from function_problems(source.sync, {}, field, field, supplied=("context",))


def _slots(config: Config) -> Iterator[Problem]:
    slots = config.rollout.slots
    sampling = config.rollout.mesh
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
        name = "rollout.source.function"
        arguments = "rollout.source.arguments"
        yield from function_problems(source.function, source.arguments, name, arguments, supplied=("context",))


def _environment(config: Config) -> Iterator[Problem]:
    """Checks what the engine of episodes does not do, and what reads one completion a row."""
    section = config.rollout
    environment = config.environment
    if environment is None:
        return
    if section.source.type not in ("jax", "openai"):
        yield problem(
            f"got one, but rollout.source.type {section.source.type} draws no turns; set that to jax or openai",
            "environment",
            "rollout.source.type",
        )
    refused: list[tuple[str, object, str]] = [
        ("rollout.slots", section.slots, "environment.rows sets the rows of the engine"),
        ("rollout.record_kept_tokens", section.record_kept_tokens, "the engine does not record them"),
    ]
    if section.source.type == "openai":
        refused += [
            ("rollout.mesh", section.mesh, "servers have weights of their own"),
            ("rollout.ahead", section.ahead, "the episodes of a step run while it waits"),
            ("environment.rows", environment.rows, "servers have a cache of their own"),
        ]
    for field, value, reason in refused:
        if value not in (None, False):
            yield problem(f"got {value!r}, but there is an environment, and {reason}", field, "environment")
    if environment.history == "template" and section.fork_rows == 0:
        text = "got template, but rollout.fork_rows is 0, and leaves no row for a fork; set it, as to 2 of 8"
        yield problem(text, "environment.history", "rollout.fork_rows")
    try:
        find_definition(environment.name)
    except LookupError as error:
        yield problem(f"got {environment.name!r}, but {error.args[0]}", "environment.name")
    if environment.turn_tokens is not None and environment.turn_tokens > config.data.max_completion_length:
        yield problem(
            f"got {environment.turn_tokens}, more than data.max_completion_length, which is the limit of an episode",
            "environment.turn_tokens",
            "data.max_completion_length",
        )
    turn = environment.turn_seconds
    episode = environment.episode_seconds
    if turn is not None and episode is not None and turn > episode:
        text = f"got {turn:g}, more than environment.episode_seconds = {episode:g}, which ends the episode before"
        yield problem(text, "environment.turn_seconds", "environment.episode_seconds")


def _renderer(config: Config) -> Iterator[Problem]:
    """Checks that a tokenizer with control tokens is there, and nothing else that writes its conversations."""
    renderer = config.renderer()
    if renderer is None:
        return
    name, family = renderer
    data = config.data
    if config.model.path is None or data.tokenizer is not None:
        field = "data.tokenizer" if data.tokenizer is not None else "model.path"
        text = f"got {family!r}, which needs the tokenizer of a folder; "
        text += "leave data.tokenizer out" if data.tokenizer is not None else "set model.path"
        yield problem(text, name, field)
    for field, value in (("data.chat", data.chat), ("data.chat_template", data.chat_template)):
        if value is not None:
            shown = str(value).lower() if isinstance(value, bool) else repr(value)
            text = f"got {shown}, but {name} {family} writes the prompts; set only one of them"
            yield problem(text, field, name)


def _turn_scores(config: Config) -> Iterator[Problem]:
    """Checks that turns are scored, if the estimator reads their scores."""
    if Plan.of(config).turns and config.environment is None:
        text = (
            f"got {config.advantage.type}, which reads a score after every turn; set an environment whose class has a "
            "method turn_score, or choose another one"
        )
        yield problem(text, "advantage.type", "environment")


def _endpoint(config: Config) -> Iterator[Problem]:
    """Checks the address, the keys and the agent program of an endpoint."""
    source = config.rollout.source
    if source.type != "endpoint":
        return
    yield from _two_keys(source, "api_key")
    yield from _two_keys(source, "reward_key")
    if source.agent is not None:
        yield from function_problems(
            source.agent,
            source.arguments,
            "rollout.source.agent",
            "rollout.source.arguments",
            supplied=AGENT_ARGUMENTS,
            coroutines=True,
        )
    elif source.port == 0:
        text = "got 0, but without rollout.source.agent a program from outside has to know the port; set one"
        yield problem(text, "rollout.source.port", "rollout.source.agent")
    if source.agent is None and source.reward_key_env is None and source.reward_key_file is None:
        yield problem(
            "missing; without rollout.source.agent a program from outside takes episodes and posts rewards with this "
            "key, which agents must not have",
            "rollout.source.reward_key_env",
            "rollout.source.agent",
        )
    if not is_loopback(source.host) and source.api_key_env is None and source.api_key_file is None:
        text = f"got {source.host!r}, which other machines reach; set rollout.source.api_key_env or api_key_file"
        yield problem(text, "rollout.source.host", "rollout.source.api_key_env")


def _forks(config: Config) -> Iterator[Problem]:
    """Checks that rows are left for episodes, and that all sequences of one have one advantage."""
    section = config.rollout
    if section.fork_rows == 0:
        return
    name = "rollout.fork_rows"
    rewrites = config.environment is not None and config.environment.history == "template"
    if section.source.type not in ("endpoint", "file") and not rewrites:
        text = (
            f"got {section.fork_rows}, but rollout.source.type {section.source.type} has no forks, unless "
            "environment.history is template; leave it at 0"
        )
        yield problem(text, name, "rollout.source.type")
    if section.fork_rows >= section.samples_per_prompt:
        text = f"got {section.fork_rows}, which leaves no row of rollout.samples_per_prompt for an episode"
        yield problem(text, name, "rollout.samples_per_prompt")
    plan = Plan.of(config)
    text = (
        f"got {section.fork_rows}, but {{}} each row by itself, and an episode that forked has several; leave it at 0"
    )
    if plan.advantage is not None and not {*arrays_of(plan.advantage, ADVANTAGE_ARRAYS).values()} <= PER_EPISODE:
        yield problem(text.format(f"advantage.type {config.advantage.type} judges"), name, "advantage.type")
    if plan.loss is not None and PER_EPISODE & {*arrays_of(plan.loss, LOSS_ARRAYS).values()}:
        yield problem(text.format(f"loss.type {config.loss.type} judges"), name, "loss.type")
    if "reward" in plan.controllers:
        yield problem(text.format("kl.reward charges"), name, "kl.reward.coef")


CHECKS = (
    _ignored,
    _file,
    _evaluation,
    _user_source,
    _server,
    _slots,
    _kept_tokens,
    _environment,
    _renderer,
    _turn_scores,
    _endpoint,
    _forks,
)
