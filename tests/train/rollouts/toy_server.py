"""A server of a bigram model that samples as vLLM or SGLang do, with the kind of log-probs that a test asks for."""

import json
from collections.abc import Mapping
from typing import Any, Literal

import numpy as np

from tests.train.rollouts.fake_server import Answer

VOCABULARY = 264
TABLE = np.random.default_rng(0).normal(size=(VOCABULARY, VOCABULARY)) * 2
"""Logits of the next token by the last one. Greedy tokens soon recur."""


def log_softmax(logits: np.ndarray) -> np.ndarray:
    shifted = logits - logits.max()
    return shifted - np.log(np.exp(shifted).sum())


class ToyServer:
    """Answers requests for completions.

    Attributes:
      bodies: the requests.
    """

    def __init__(
        self,
        kind: Literal["raw", "tempered", "processed"] = "raw",
        *,
        owner: str = "vllm",
        defaults: Mapping[str, Any] = {},
        forced: Mapping[str, Any] = {},
    ) -> None:
        """Takes what the server has for fields that a request leaves out, and what it does whatever a request says."""
        self._kind, self._owner, self._defaults, self._forced = kind, owner, dict(defaults), dict(forced)
        self.bodies: list[dict[str, Any]] = []

    def __call__(self, path: str, body: dict) -> Answer:
        """One answer."""
        if path == "/v1/models":
            return 200, json.dumps({"data": [{"id": "m", "owned_by": self._owner}]})
        self.bodies.append(body)
        ids, log_probs, tops = self._complete({**self._defaults, **body, **self._forced})
        ended = ids[-1] in body["stop_token_ids"]
        values = {"token_logprobs": log_probs, "top_logprobs": tops if body.get("logprobs") else None}
        choice = {"index": 0, "token_ids": ids, "logprobs": values, "finish_reason": "stop" if ended else "length"}
        return 200, json.dumps({"choices": [choice]})

    def _complete(self, request: Mapping[str, Any]) -> tuple[list[int], list[float], list[dict[str, float]]]:
        context, random = list(request["prompt"]), np.random.default_rng(request["seed"])
        ids: list[int] = []
        log_probs: list[float] = []
        tops: list[dict[str, float]] = []
        while len(ids) < request["max_tokens"]:
            raw = TABLE[context[-1]]
            penalty, seen = request.get("repetition_penalty", 1.0), np.isin(np.arange(VOCABULARY), context)
            penalized = np.where(seen, np.where(raw > 0, raw / penalty, raw * penalty), raw)
            tempered = penalized / request["temperature"]
            is_kept = tempered >= np.sort(tempered)[-request["top_k"]] if request["top_k"] > 0 else tempered > -np.inf
            processed = np.where(is_kept, tempered, -np.inf)
            token = int(random.choice(VOCABULARY, p=np.exp(log_softmax(processed))))
            reported = log_softmax({"raw": raw, "tempered": tempered, "processed": processed}[self._kind])
            ids.append(token)
            context.append(token)
            log_probs.append(float(reported[token]))
            tops.append({"sampled": log_probs[-1], "most probable": float(reported.max())})
            if token in request["stop_token_ids"]:
                break
        return ids, log_probs, tops
