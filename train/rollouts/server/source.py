"""A source that samples on OpenAI-compatible servers."""

import contextlib
import dataclasses
import functools
import itertools
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from queue import Empty, SimpleQueue
from typing import Any, NamedTuple, TypeVar

import jax

import kljax
from train.config.errors import UserError
from train.config.rollout import OpenAISourceSection
from train.context import RunContext
from train.data.tokenizers import decode_continuation
from train.distributed.exchange import run_together
from train.process.interrupt import leave_if_stopping
from train.rollouts.routes import records_routes
from train.rollouts.server.answers import Requested, read_answer, read_probe
from train.rollouts.server.client import MOST_BYTES, POLL_SECONDS, Client, wait_for
from train.rollouts.server.engines import Engines
from train.rollouts.server.key import read_key
from train.rollouts.server.probe import FIRST_PROMPT, TEMPERATURES, Probe, check_probes, probe_body, second_prompt
from train.rollouts.server.routes import MOST_BYTES_PER_EXPERT, routes_size
from train.rollouts.server.weights import NoSync, Sync, make_sync
from train.rollouts.source import Completions, FinishedSamples, Request, SourceError
from train.sequences.sample import Sample
from train.sequences.token_fields import ROUTES, UNKNOWN, VERSIONS

BYTES_PER_TOKEN = 2**10
"""Room of an answer for one token; vLLM 0.32 writes about 100 bytes for its id, text and log-probs."""
UNCHANGED: Mapping[str, Any] = {
    "repetition_penalty": 1.0,
    "presence_penalty": 0.0,
    "frequency_penalty": 0.0,
    "min_tokens": 0,
    "ignore_eos": False,
    "skip_special_tokens": True,
    # vLLM's and SGLang's name; a watermark draws equal tokens after equal ones.
    "watermarking": False,
    "watermark": {"enabled": False},
}
"""Fields at the values that sample from the policy.

Where a request leaves them out, a server takes its own defaults or the model's `generation_config.json`.
"""
GREEDY: Mapping[str, Any] = {"temperature": 0.0, "top_p": 1.0, "top_k": -1, "min_p": 0.0}
"""Fields at the values that take the most probable tokens."""


def field_sizes(context: RunContext) -> dict[str, tuple[int, ...]]:
    """Returns the per-token fields of a server's answers, with the sizes of their trailing axes."""
    sizes: dict[str, tuple[int, ...]] = {VERSIONS: ()}
    if context.config.rollout.record_log_probs:
        sizes["rollout_log_probs"] = ()
    return sizes | ({ROUTES: context.model.config.route_shape} if records_routes(context) else {})


class RequestedWeights(NamedTuple):
    """The weights that requests ask for: the name of the model, and its number of RL steps; -1 if nobody knows."""

    model: str
    version: int


@dataclasses.dataclass
class Sent:
    """One request of the trainer, which may be under way.

    Attributes:
      request: the request of all processes, of which each sends its own rows.
      answers: the completions, to come.
      began: when it was started, in seconds of `time.perf_counter`.
      ended: when the last answer was there; None before.
    """

    request: Request
    answers: Future[list[Sample]]
    began: float
    ended: float | None = None


_Read = TypeVar("_Read")


def row_seeds(key: jax.Array, count: int) -> list[int]:
    """Draws a seed for each row of a step; no two are equal, as a server may draw equal tokens from equal seeds.

    Example:
      >>> seeds = row_seeds(jax.random.key(0), 1000)
      >>> len(set(seeds)), min(seeds) >= 0, max(seeds) < 2**31
      (1000, True, True)
    """
    seeds: dict[int, None] = {}
    for drawn in jax.device_get(jax.random.randint(key, (count,), 0, 2**31 - 1)).tolist():
        free = next(seed for seed in itertools.count(drawn) if seed % 2**31 not in seeds)
        seeds[free % 2**31] = None
    return list(seeds)


def _seeds(request: Request) -> list[int]:
    """Returns the seed of each row; those of held-out prompts do not depend on the size of the request."""
    if request.first_row is None:
        return row_seeds(request.key, request.rows.count)
    rows = range(request.first_row, request.first_row + request.rows.count)
    return [seed for row in rows for seed in row_seeds(jax.random.fold_in(request.key, row), 1)]


class ServerSource:
    """Requests each completion, as token ids, with a seed of its own; texts are decoded by the tokenizer of the run.

    The weights may change while requests are in flight: a request has those of the moment when it is sent, so that the
    completions of one prompt may have two versions.

    Servers repeat their tokens only for the same batching. A resumed run is therefore the same algorithm with other
    samples.
    """

    row_count: int | None = None

    def __init__(self, context: RunContext, section: OpenAISourceSection, client: Client | None = None) -> None:
        """Connects to the servers, and checks the responses of each to short greedy requests.

        Raises:
          UserError: a server is unreachable, lacks the model, returns no ids or no usable log-probs, or samples from
            another distribution than it is asked to.
        """
        self._context = context
        self._section = section
        self._client = client or Client(
            timeout=section.timeout,
            retries=section.retries,
            connections=section.concurrency,
            key=read_key("rollout.source.api_key_", env=section.api_key_env, file=section.api_key_file),
            field="rollout.source.urls" if section.urls else "rollout.source.url",
        )
        self._engines = Engines(self._client, section)
        self._weights = RequestedWeights(section.model, UNKNOWN)
        self._step: int | None = None
        self._in_flight: list[Sent] = []
        self._finished: SimpleQueue[Sent] = SimpleQueue()
        self._sync: Sync = NoSync(section.model)
        try:
            self._sync = make_sync(self._engines, context)
            self._check()
        except UserError:
            with contextlib.suppress(SourceError):
                self.close()
            raise

    def update(self, policy: kljax.Policy, version: int) -> None:
        """Sends the weights of a new version to the servers."""
        if version == self._step:
            return
        self._engines.agree()
        with contextlib.ExitStack() as stack:
            if self._sync.in_place:
                run_together("rollout", lambda: stack.enter_context(self._engines.held_back()))
            model = self._sync.load(policy, version)
            self._weights = RequestedWeights(model, UNKNOWN if self._section.sync == "none" else version)
        self._engines.agree()
        self._step = version

    def start(self, requests: Sequence[Request]) -> None:
        """Begins to request the completions of all prompts, and returns at once."""
        for request in requests:
            began = time.perf_counter()
            rows = request.rows
            seeds = _seeds(request)
            prompts = [request.prompt_of(row, self._context.tokenizer) for row in rows.own]
            bodies = [self._body(prompt, seeds[row]) for prompt, row in zip(prompts, rows.own, strict=True)]
            if request.greedy:
                bodies = [{**body, **GREEDY} for body in bodies]
            sent = Sent(request, self._ask(bodies, read_answer), began)
            self._in_flight.append(sent)
            sent.answers.add_done_callback(functools.partial(self._end, sent))

    def ask_turn(
        self, prompt: Sequence[int], *, max_tokens: int, seed: int, greedy: bool, place: int | None
    ) -> Future[list[Sample]]:
        """Begins to request one turn of an episode, of the server in this place of the pool if it is there."""
        body = self._body(prompt, seed) | {"max_tokens": max_tokens} | (dict(GREEDY) if greedy else {})
        return self._ask([body], read_answer, place=place)

    @property
    def metrics(self) -> Mapping[str, float]:
        """The metrics of the pool."""
        return self._engines.metrics

    def take(self) -> FinishedSamples:
        """Waits for the answers of the request that ends next, and pads the rows of this process."""
        sent = self._next_finished()
        self._in_flight.remove(sent)
        completions = self._completions(sent, sent.answers.result())
        assert sent.ended is not None
        return FinishedSamples(sent.request, completions, sent.request.rows.own, seconds=sent.ended - sent.began)

    def _next_finished(self) -> Sent:
        """Waits for the request that ends next; an interrupt of the caller ends all that are in flight."""
        try:
            while True:
                try:
                    return self._finished.get(timeout=POLL_SECONDS)
                except Empty:
                    leave_if_stopping()
        except BaseException:
            self._cancel()
            raise

    def _cancel(self) -> None:
        for sent in self._in_flight:
            sent.answers.cancel()

    def _end(self, sent: Sent, _: Future[list[Sample]]) -> None:
        sent.ended = time.perf_counter()
        self._finished.put(sent)

    def close(self) -> None:
        """Ends what is in flight, unloads the adapters, removes the written weights, and closes the connections."""
        self._cancel()
        self._client.hurry()
        try:
            self._sync.close()
        finally:
            self._client.close()

    def _body(self, prompt: Sequence[int], seed: int) -> dict[str, Any]:
        """Returns the request for a completion but for the model, with every field that changes what is sampled."""
        config = self._context.config
        section = self._context.config.rollout
        body: dict[str, Any] = {
            "prompt": list(prompt),
            "n": 1,
            "max_tokens": min(config.data.max_completion_length, config.data.row_length() - len(prompt)),
            "temperature": config.temperature,
            "top_p": section.top_p,
            "top_k": section.top_k or -1,
            "min_p": section.min_p,
            **UNCHANGED,
            "seed": seed,
            "stop_token_ids": list(self._context.tokenizer.eos_ids),
            "return_token_ids": True,
        }
        if section.stop:
            body["stop"] = list(section.stop)
        if section.record_log_probs:
            body["logprobs"] = 0
        if records_routes(self._context):
            # For SGLang; vLLM returns them if it was started so.
            body["return_routed_experts"] = True
        return body

    def _ask(
        self,
        bodies: Sequence[dict[str, Any]],
        read: Callable[[Requested, bytes], _Read],
        url: str | None = None,
        place: int | None = None,
    ) -> Future[list[_Read]]:
        """Begins to request completions, which come in the order of their requests, of one server or any."""

        def ask(body: dict[str, Any]) -> tuple[dict[str, Any], Callable[[bytes], _Read]]:
            weights = self._weights
            return body | {"model": weights.model}, functools.partial(read, self._requested(body, weights))

        tokens = max((len(body["prompt"]) + body["max_tokens"] for body in bodies), default=0)
        routes_bytes = routes_size(self._context.model.config) * MOST_BYTES_PER_EXPERT
        per_token = BYTES_PER_TOKEN + (routes_bytes if records_routes(self._context) else 0)
        return self._engines.complete(
            "/v1/completions",
            [functools.partial(ask, body) for body in bodies],
            most_bytes=self._section.max_response_bytes or MOST_BYTES + tokens * per_token,
            url=url,
            place=place,
        )

    def _requested(self, body: Mapping[str, Any], weights: RequestedWeights) -> Requested:
        return Requested(
            prompt=body["prompt"],
            max_new_tokens=body["max_tokens"],
            vocab_size=self._context.model.config.vocab_size,
            eos_ids=body["stop_token_ids"],
            stops="stop" in body,
            log_probs=self._context.config.rollout.record_log_probs,
            routes_of=self._context.model.config if records_routes(self._context) else None,
            version=weights.version,
            versions=self._engines.versions if weights.model == self._section.model and self._engines.label else None,
            spans=self._section.in_flight == "keep",
        )

    def _completions(self, sent: Sent, answers: Sequence[Sample]) -> Completions:
        """Pads and decodes the rows that this process judges."""
        request = sent.request
        tokenizer = self._context.tokenizer
        for answer in answers:
            answer.text = decode_continuation(tokenizer, answer.prompt_ids, answer.completion_ids)
        return Completions.of(
            answers,
            [request.examples[row // request.samples] for row in request.rows.own],
            field_sizes(self._context),
            length=self._context.config.data.row_length(),
            pad_id=tokenizer.pad_id,
            metrics=self.metrics,
        )

    def _check(self) -> None:
        """Checks that weights can reach every server, and ids, log-probs and experts of greedy tokens of each."""
        models = self._engines.models()
        if self._section.model not in models:
            address = self._section.url or "every server of rollout.source.urls"
            raise UserError(
                f"rollout.source.model: got {self._section.model!r}, but {address} serves: "
                f"{self._client.clean(', '.join(models)) or 'nothing'}"
            )
        if self._section.sync != "none":
            self._engines.check_routes()
        config = self._context.config
        firsts = self._probe(dict.fromkeys(self._engines.urls, FIRST_PROMPT), temperature=1.0)
        if config.rollout.record_log_probs:
            prompts = {url: second_prompt(answer.completion_ids) for url, (answer, _) in firsts.items()}
            # One after the other: together they might be computed in another way than each alone.
            at_one, at_half = (self._probe(prompts, temperature) for temperature in TEMPERATURES)
            for url in prompts:
                pair = (at_one[url], at_half[url])
                probes = [
                    Probe(answer.completion_ids, answer.of_completion("rollout_log_probs"), largest)
                    for answer, largest in pair
                ]
                check_probes(config, url, models[self._section.model], *probes)
        for url, (answer, _) in firsts.items():
            routes = answer.fields.get(ROUTES)
            if routes is not None and (routes < 0).all() and config.routing.missing == "error":
                raise UserError(
                    f"routing.replay: got rollout, but the answers of {url} have no routed_experts; start "
                    "vLLM or SGLang with --enable-return-routed-experts, or set routing.missing=choose or "
                    "routing.replay=none"
                )

    def _probe(self, prompts: Mapping[str, Sequence[int]], temperature: float) -> dict[str, tuple[Sample, list[float]]]:
        """Requests greedy tokens from each server."""
        sent = {}
        for url, prompt in prompts.items():
            body = probe_body(self._body(prompt, 0), self._context.config, prompt, temperature)
            sent[url] = self._ask([body], read_probe, url)
        return {url: wait_for(answers)[0] for url, answers in sent.items()}
