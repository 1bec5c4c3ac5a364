"""A source that samples on an OpenAI-compatible server."""

import dataclasses
import functools
import itertools
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from typing import Any, NamedTuple, TypeVar

import jax
import numpy as np

import kljax
from train.config.errors import UserError
from train.config.rollout import OpenAISourceSection
from train.context import RunContext
from train.data.padding import pad_rows
from train.data.prompts import decode_completions, encode_prompts
from train.distributed.exchange import any_of, run_together
from train.distributed.global_arrays import gather_rows
from train.rl.token_fields import ROUTES
from train.rollouts.routes import records_routes
from train.rollouts.server.answers import Requested, ServerAnswer, read_answer, read_models, read_probe
from train.rollouts.server.client import MOST_BYTES, Client, wait_for
from train.rollouts.server.key import read_key
from train.rollouts.server.probe import FIRST_PROMPT, TEMPERATURES, Probe, check_probes, probe_body, second_prompt
from train.rollouts.server.routes import MOST_BYTES_PER_EXPERT, routes_size
from train.rollouts.server.weights import Sync, make_sync
from train.rollouts.source import Completions, Request, SourceError

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


def field_sizes(context: RunContext) -> dict[str, tuple[int, ...]]:
    """Returns the per-token fields of a server's answers, with the sizes of their trailing axes."""
    sizes: dict[str, tuple[int, ...]] = {"log_probs": ()} if context.config.rollout.record_log_probs else {}
    return sizes | ({ROUTES: context.model.config.route_shape} if records_routes(context) else {})


@dataclasses.dataclass
class Sent:
    """The requests of one step, which may be under way.

    Attributes:
      request: the request of all processes, of which each sends its own rows.
      prompts: the ids of the prompt of each of them.
      lag: RL steps since the server got its weights.
      answers: the completions, to come.
      began: when it was sent, in seconds of `time.perf_counter`.
      ended: when the last answer was there; None before.
    """

    request: Request
    prompts: list[list[int]]
    lag: int
    answers: Future[list[ServerAnswer]]
    began: float
    ended: float | None = None

    def end(self) -> None:
        """Marks the request as complete."""
        self.ended = time.perf_counter()


class Received(NamedTuple):
    """The rows of one step that this process holds: the arrays of `Completions`, `finished` and `lags` by name."""

    step: int
    arrays: dict[str, np.ndarray]
    timings: dict[str, float]


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


class ServerSource:
    """Requests each completion, as token ids, with a seed of its own; texts are decoded by the tokenizer of the run.

    Servers repeat their tokens only for the same batching. A resumed run is therefore the same algorithm with other
    samples.
    """

    def __init__(self, context: RunContext, section: OpenAISourceSection, client: Client | None = None) -> None:
        """Connects to the server, and checks the responses to short greedy requests.

        Raises:
          UserError: the server is unreachable, lacks the model, returns no ids or no usable log-probs, or samples from
            another distribution than it is asked to.
        """
        self._context, self._section = context, section
        self._client = client or Client(
            section.url,
            timeout=section.timeout,
            retries=section.retries,
            connections=section.concurrency,
            key=read_key(section),
        )
        self._model = section.model
        self._step = -1
        try:
            self._sync: Sync = make_sync(self._client, context)
            self._check()
        except UserError:
            self._client.close()
            raise

    def update(self, policy: kljax.Policy, step: int) -> None:
        """Sends the weights of a new step to the server."""
        if step != self._step:
            self._model = self._sync.load(policy, step)
            self._step = step

    def sample(self, request: Request) -> Completions:
        """Requests all completions, `concurrency` at a time; the first error ends all requests."""
        return self.completions(request, self.receive(self.send(request)))

    def send(self, request: Request) -> Sent:
        """Begins to request the completions of all prompts from the server's weights, and returns at once."""
        began = time.perf_counter()
        rows = request.rows
        of_prompts = self._prompts(request)
        seeds = row_seeds(request.key, rows.count)
        prompts = [of_prompts[row // request.samples] for row in rows.own]
        bodies = [self._body(prompt, seeds[row]) for prompt, row in zip(prompts, rows.own, strict=True)]
        answers = self._start(bodies, read_answer)
        sent = Sent(request, prompts, request.step - self._step, answers, began)
        answers.add_done_callback(lambda _: sent.end())
        return sent

    def receive(self, sent: Sent) -> Received:
        """Waits for the answers, and pads them; processes that share rows exchange them."""
        began = time.perf_counter()
        answers = run_together("rollout", lambda: wait_for(sent.answers))
        now = time.perf_counter()
        arrays = self._held_rows(sent, answers)
        seconds = (sent.ended or now) - sent.began
        tokens = int(arrays["completion_mask"].sum())
        timings = {"rollout_tokens_per_second": tokens / seconds, "rollout_wait": now - began}
        return Received(sent.request.step, arrays, timings)

    def close(self) -> None:
        """Unloads the adapter, removes the written weights, and closes the connections."""
        self._client.hurry()
        self._sync.close()
        self._client.close()

    def _prompts(self, request: Request) -> list[list[int]]:
        length = self._context.config.data.max_prompt_length
        tokens, mask = encode_prompts(request.examples, self._context.tokenizer, length)
        return [row[real].tolist() for row, real in zip(tokens, mask, strict=True)]

    def _body(self, prompt: Sequence[int], seed: int) -> dict[str, Any]:
        """Returns the request for a completion, with every field that changes what is sampled."""
        config = self._context.config
        section = self._context.config.rollout
        body: dict[str, Any] = {
            "model": self._model,
            "prompt": list(prompt),
            "n": 1,
            "max_tokens": config.data.max_completion_length,
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

    def _start(
        self, bodies: Sequence[dict[str, Any]], read: Callable[[Requested, bytes], _Read]
    ) -> Future[list[_Read]]:
        """Begins to request completions, which come in the order of their requests."""
        tokens = max((len(body["prompt"]) + body["max_tokens"] for body in bodies), default=0)
        routes_bytes = routes_size(self._context.model.config) * MOST_BYTES_PER_EXPERT
        per_token = BYTES_PER_TOKEN + (routes_bytes if records_routes(self._context) else 0)
        return self._client.post_all(
            "/v1/completions",
            bodies,
            [functools.partial(read, self._requested(body)) for body in bodies],
            most_bytes=self._section.max_response_bytes or MOST_BYTES + tokens * per_token,
        )

    def _requested(self, body: Mapping[str, Any]) -> Requested:
        return Requested(
            prompt=body["prompt"],
            max_new_tokens=body["max_tokens"],
            vocab_size=self._context.model.config.vocab_size,
            eos_ids=body["stop_token_ids"],
            stops="stop" in body,
            log_probs=self._context.config.rollout.record_log_probs,
            routes_of=self._context.model.config if records_routes(self._context) else None,
        )

    def _held_rows(self, sent: Sent, answers: Sequence[ServerAnswer]) -> dict[str, np.ndarray]:
        """Pads the own rows of this process, and returns the rows that it holds."""
        config = self._context.config
        padded = pad_rows(
            sent.prompts,
            [answer.tokens for answer in answers],
            {name: [answer.fields[name] for answer in answers] for name in field_sizes(self._context)},
            lengths=(config.data.max_prompt_length, config.data.max_completion_length),
            pad_id=self._context.tokenizer.pad_id,
            sizes=field_sizes(self._context),
        )
        arrays = {
            "tokens": padded["tokens"],
            "token_mask": padded["token_mask"],
            "completion_mask": padded["completion_mask"],
            **padded["fields"],
            "finished": np.array([answer.finished for answer in answers], bool),
            "lags": np.full(len(answers), sent.lag, np.int32),
        }
        rows = sent.request.rows
        if any_of("rollout", not np.array_equal(rows.own, rows.held)):
            gathered = gather_rows("rollout", arrays, rows.own, rows.count)
            arrays = {name: array[rows.held] for name, array in gathered.items()}
        return arrays

    def completions(self, request: Request, received: Received) -> Completions:
        """Decodes the rows that this process judges."""
        arrays = received.arrays
        config = self._context.config
        select_own = request.rows.select_own
        sequences = arrays["tokens"], arrays["token_mask"], arrays["completion_mask"]
        tokens, token_mask, mask = (select_own(array) for array in sequences)
        return Completions(
            examples=[request.examples[row // request.samples] for row in request.rows.own],
            tokens=arrays["tokens"],
            token_mask=arrays["token_mask"],
            completion_mask=arrays["completion_mask"],
            fields={name: arrays[name] for name in field_sizes(self._context)},
            finished=select_own(arrays["finished"]),
            lags=select_own(arrays["lags"]) if config.rollout.ahead else None,
            texts=decode_completions(tokens, token_mask, mask, self._context.tokenizer),
            timings=received.timings,
        )

    def _check(self) -> None:
        """Requests greedy tokens from the base model, and checks ids, log-probs and experts."""
        owners = self._client.get("/v1/models", read_models)
        if self._section.model not in owners:
            raise UserError(
                f"rollout.source.model: got {self._section.model!r}, but {self._section.url} serves: "
                f"{self._client.clean(', '.join(owners)) or 'nothing'}"
            )
        config = self._context.config
        first, _ = self._probe(FIRST_PROMPT, temperature=1.0)
        if config.rollout.record_log_probs:
            # One after the other: together they might be computed in another way than each alone.
            answers = [self._probe(second_prompt(first.tokens), temperature) for temperature in TEMPERATURES]
            probes = [Probe(answer.tokens, answer.fields["log_probs"], largest) for answer, largest in answers]
            check_probes(config, self._section.url, owners[self._section.model], *probes)
        routes = first.fields.get(ROUTES)
        if routes is not None and (routes < 0).all() and config.routing.missing == "error":
            raise UserError(
                f"routing.replay: got rollout, but the answers of {self._section.url} have no routed_experts; start "
                "vLLM or SGLang with --enable-return-routed-experts, or set routing.missing=choose or "
                "routing.replay=none"
            )

    def _probe(self, prompt: Sequence[int], temperature: float) -> tuple[ServerAnswer, list[float]]:
        """Requests greedy tokens."""
        body = probe_body(self._body(prompt, 0), self._context.config, prompt, temperature)
        return wait_for(self._start([body], read_probe))[0]


__all__ = ["ServerSource", "SourceError"]
