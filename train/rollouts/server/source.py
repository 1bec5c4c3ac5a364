"""A source that samples on an OpenAI-compatible server."""

import dataclasses
import functools
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Any, NamedTuple

import jax
import numpy as np

import kljax
from train.config.errors import UserError
from train.config.rollout import OpenAISourceSection
from train.context import RunContext
from train.data.padding import pad_rows
from train.data.prompts import decode_completions, encode_prompts
from train.distributed.exchange import any_of, run_together
from train.distributed.global_arrays import gather_rows, row_owners
from train.distributed.peers import process
from train.models.sharding import batch_sharding
from train.rl.token_fields import ROUTES
from train.rollouts.routes import records_routes
from train.rollouts.server.answers import Requested, ServerAnswer, read_answers, read_models
from train.rollouts.server.client import MOST_BYTES, Client, wait_for
from train.rollouts.server.key import read_key
from train.rollouts.server.routes import MOST_BYTES_PER_EXPERT, routes_size
from train.rollouts.server.weights import Sync, make_sync
from train.rollouts.source import Completions, Request, SourceError

# With top_k=1, log-probs after the cuts are 0, and log-probs of the full softmax are not.
PROCESSED = 1e-30
BYTES_PER_TOKEN = 2**10
"""Room of an answer for one token; vLLM 0.32 writes about 100 bytes for its id, text and log-probs."""


def field_sizes(context: RunContext) -> dict[str, tuple[int, ...]]:
    """Returns the per-token fields of a server's answers, with the sizes of their trailing axes."""
    sizes: dict[str, tuple[int, ...]] = {"log_probs": ()} if context.config.rollout.record_log_probs else {}
    return sizes | ({ROUTES: context.model.config.route_shape} if records_routes(context) else {})


@dataclasses.dataclass
class Sent:
    """The requests of one step, which may be under way.

    Attributes:
      request: the request of all processes.
      numbers: the prompts that this process sent.
      prompts: their ids.
      lag: RL steps since the server got its weights.
      answers: the completions of each prompt, to come.
      began: when it was sent, in seconds of `time.perf_counter`.
      ended: when the last answer was there; None before.
    """

    request: Request
    numbers: np.ndarray
    prompts: list[list[int]]
    lag: int
    answers: Future[list[list[ServerAnswer]]]
    began: float
    ended: float | None = None

    def end(self) -> None:
        """Notes that the last answer is there."""
        self.ended = time.perf_counter()


class Received(NamedTuple):
    """The rows of one step that this process holds: the arrays of `Completions`, `finished` and `lags` by name."""

    step: int
    arrays: dict[str, np.ndarray]
    timings: dict[str, float]


class ServerSource:
    """Requests all completions of a prompt at once, as token ids; texts are decoded by the tokenizer of the run.

    Where an answer has room for the experts of one completion, as SGLang's has, each completion is a request.

    Every request has a seed, but servers repeat their tokens only for the same batching. A resumed run is therefore the
    same algorithm with other samples.
    """

    def __init__(self, context: RunContext, section: OpenAISourceSection, client: Client | None = None) -> None:
        """Connects to the server, and checks the response to a request for one token.

        Raises:
          UserError: the server is unreachable, lacks the model, or returns no ids or no usable log-probs.
        """
        self._context, self._section = context, section
        self._client = client or Client(
            section.url,
            timeout=section.timeout,
            retries=section.retries,
            connections=section.concurrency,
            key=read_key(section),
        )
        self._model, self._step, self._requests_each = section.model, -1, False
        try:
            self._sync: Sync = make_sync(self._client, context)
            self._check()
        except UserError:
            self._client.close()
            raise

    def update(self, policy: kljax.Policy, step: int) -> None:
        """Sends the weights of a new step to the server."""
        if step != self._step:
            self._model, self._step = self._sync.load(policy, step), step

    def sample(self, request: Request) -> Completions:
        """Requests the completions of all prompts, `concurrency` at a time; the first error ends all requests."""
        return self.completions(request, self.receive(self.send(request)))

    def send(self, request: Request) -> Sent:
        """Begins to request the completions of all prompts from the server's weights, and returns at once."""
        began = time.perf_counter()
        prompts = self._prompts(request)
        seeds = jax.device_get(jax.random.randint(request.key, (len(prompts),), 0, 2**31 - 1)).tolist()
        rows = len(prompts) * request.samples
        owners = row_owners(batch_sharding(self._context.mesh), rows)
        numbers = np.flatnonzero(owners[:: request.samples] == process())
        bodies = [body for index in numbers for body in self._bodies(prompts[index], request.samples, seeds[index])]
        answers = self._start(bodies)
        sent = Sent(request, numbers, [prompts[index] for index in numbers], request.step - self._step, answers, began)
        answers.add_done_callback(lambda _: sent.end())
        return sent

    def receive(self, sent: Sent) -> Received:
        """Waits for the answers, and pads them; processes that share rows exchange them."""
        began = time.perf_counter()
        answers = run_together(
            "rollout", lambda: [answer for of_prompt in wait_for(sent.answers) for answer in of_prompt]
        )
        now, arrays = time.perf_counter(), self._held_rows(sent, answers)
        seconds = (sent.ended or now) - sent.began
        timings = {"rollout_tokens_per_second": arrays["completion_mask"].sum() / seconds, "rollout_wait": now - began}
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

    def _bodies(self, prompt: Sequence[int], samples: int, seed: int) -> list[dict[str, Any]]:
        """Returns the requests for the completions of a prompt."""
        if not self._requests_each:
            return [self._body(prompt, samples, seed)]
        return [self._body(prompt, 1, (seed + sample) % 2**31) for sample in range(samples)]

    def _body(self, prompt: Sequence[int], samples: int, seed: int) -> dict[str, Any]:
        config, section = self._context.config, self._context.config.rollout
        body: dict[str, Any] = {
            "model": self._model,
            "prompt": list(prompt),
            "n": samples,
            "max_tokens": config.data.max_completion_length,
            "temperature": config.temperature,
            "top_p": section.top_p,
            "top_k": section.top_k or -1,
            "min_p": section.min_p,
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

    def _start(self, bodies: Sequence[dict[str, Any]]) -> Future[list[list[ServerAnswer]]]:
        """Begins to request completions, all of a prompt at once; they come in the order of prompts and indices."""
        tokens = max((body["n"] * (len(body["prompt"]) + body["max_tokens"]) for body in bodies), default=0)
        routes_bytes = routes_size(self._context.model.config) * MOST_BYTES_PER_EXPERT
        per_token = BYTES_PER_TOKEN + (routes_bytes if records_routes(self._context) else 0)
        return self._client.post_all(
            "/v1/completions",
            bodies,
            [self._reader(body) for body in bodies],
            most_bytes=self._section.max_response_bytes or MOST_BYTES + tokens * per_token,
        )

    def _reader(self, body: dict[str, Any]) -> Callable[[bytes], list[ServerAnswer]]:
        requested = Requested(
            prompt=body["prompt"],
            samples=body["n"],
            max_new_tokens=body["max_tokens"],
            vocab_size=self._context.model.config.vocab_size,
            eos_ids=body["stop_token_ids"],
            stops="stop" in body,
            log_probs=self._context.config.rollout.record_log_probs,
            routes_of=self._context.model.config if records_routes(self._context) else None,
        )
        return functools.partial(read_answers, requested=requested)

    def _held_rows(self, sent: Sent, answers: Sequence[ServerAnswer]) -> dict[str, np.ndarray]:
        """Pads the answers to the prompts of this process, and returns the rows that it holds."""
        config, samples = self._context.config, sent.request.samples
        padded = pad_rows(
            [prompt for prompt in sent.prompts for _ in range(samples)],
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
        answered = (sent.numbers[:, None] * samples + np.arange(samples)).ravel()
        if any_of("rollout", not np.array_equal(answered, rows.held)):
            gathered = gather_rows("rollout", arrays, answered, rows.count)
            arrays = {name: array[rows.held] for name, array in gathered.items()}
        return arrays

    def completions(self, request: Request, received: Received) -> Completions:
        """Decodes the rows that this process judges."""
        arrays, config, select_own = received.arrays, self._context.config, request.rows.select_own
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
        """Requests one token from the base model, and checks the ids and the kind of the log-probs."""
        names = self._client.get("/v1/models", read_models)
        if self._section.model not in names:
            raise UserError(
                f"rollout.source.model: got {self._section.model!r}, but {self._section.url} serves: "
                f"{self._client.clean(', '.join(names)) or 'nothing'}"
            )
        body = self._body([0], 1, 0) | {"max_tokens": 1, "temperature": 1.0, "top_k": 1, "top_p": 1.0, "min_p": 0.0}
        ((answer,),) = wait_for(self._start([body]))
        if log_probs := answer.fields.get("log_probs"):
            self._check_kind(processed=abs(log_probs[0]) < PROCESSED)
        self._requests_each = answer.routes_of_answer
        routes = answer.fields.get(ROUTES)
        if routes is not None and (routes < 0).all() and self._context.config.routing.missing == "error":
            raise UserError(
                f"routing.replay: got rollout, but the answers of {self._section.url} have no routed_experts; start "
                "vLLM or SGLang with --enable-return-routed-experts, or set routing.missing=choose or "
                "routing.replay=none"
            )

    def _check_kind(self, *, processed: bool) -> None:
        """Checks that log-probs are of the full softmax at the temperature of the config, as in the trainer."""
        config, section = self._context.config, self._context.config.rollout
        if config.temperature != 1 and not processed:
            raise UserError(
                f"temperature: got {config.temperature:g}, but the log-probs of {self._section.url} are those at "
                "temperature 1; start vLLM with --logprobs-mode processed_logprobs, or set "
                "rollout.record_log_probs=false"
            )
        cut = section.top_k > 0 or section.top_p < 1 or section.min_p > 0
        if cut and processed:
            raise UserError(
                f"rollout.top_k, top_p, min_p: the log-probs of {self._section.url} are those after the cut; start "
                "vLLM with --logprobs-mode raw_logprobs, or set rollout.record_log_probs=false"
            )


__all__ = ["ServerSource", "SourceError"]
