"""Checks of a server before a run: the kind of its log-probs, and whether it samples as it is asked to."""

import math
from collections.abc import Sequence
from typing import Any, Literal, NamedTuple

from train.config.errors import UserError
from train.config.schema import Config

FIRST_PROMPT = [0]
PROBED_TOKENS = 32
"""The most tokens of a probe."""
LEAST_LENGTH = 16
"""Tokens of prompt and completion that every server takes."""
TEMPERATURES = (1.0, 0.5)
"""Temperatures of the probes whose log-probs are compared."""
GREEDY = {"top_k": 1, "top_p": 1.0, "min_p": 0.0, "stop_token_ids": [], "ignore_eos": True, "seed": 0, "logprobs": 1}
"""Fields of a probe: the most probable token at each position, past the end of a text."""
AFTER_CUTS = 1e-30
"""With `top_k` 1 log-probs after the cuts are 0, and some log-prob of the full softmax is not."""
CERTAIN = 1e-3
"""Greedy tokens whose log-probs add up to less, in nats, are certain at every temperature."""
SAME = 0.9
"""Sums of log-probs at temperatures 0.5 and 1 with a larger ratio are equal; of uncertain tokens it is far below."""
NOT_THE_MOST_PROBABLE = 0.05
"""Nats that rounding may put between the log-prob of the most probable token and the largest one."""

Kind = Literal["raw", "tempered", "processed", "unknown"]
_ADVICE = {
    "vllm": {
        "temperature": "start vLLM with --logprobs-mode processed_logprobs",
        "uncut": "start vLLM with --logprobs-mode raw_logprobs",
        "defaults": "start vLLM with --generation-config vllm and no logits processor",
    },
    "sglang": {
        "temperature": "start SGLang without SGLANG_RETURN_ORIGINAL_LOGPROB (older: RETURN_ORIGINAL_LOGPROB)",
        "uncut": "start SGLang with its default log-probs",
        "defaults": "start SGLang with --sampling-defaults openai and no logit processor",
    },
}


class Probe(NamedTuple):
    """The answer to one probe.

    Attributes:
      tokens: its ids.
      log_probs: of the ids; minus infinity where there is none.
      largest: the largest log-prob at each position; empty if the answer has none.
    """

    tokens: Sequence[int]
    log_probs: Sequence[float]
    largest: Sequence[float]


def log_prob_kind(at_one: Probe, at_half: Probe) -> Kind:
    """Tells the kind of a server's log-probs from the same greedy tokens at temperatures 1 and 0.5.

    Returns:
      "raw": of the full softmax at temperature 1, whatever the request says (vLLM); "tempered": of the full softmax at
      the temperature (SGLang); "processed": of what is left after the cuts; "unknown" if the tokens are not the same,
      or all of them are certain.

    Example:
      >>> full, colder, cut = (Probe([7, 7], values, []) for values in ([-0.5, -1.2], [-0.2, -0.8], [0.0, 0.0]))
      >>> log_prob_kind(full, full), log_prob_kind(full, colder), log_prob_kind(cut, cut)
      ('raw', 'tempered', 'processed')
    """
    if all(abs(log_prob) < AFTER_CUTS for log_prob in at_one.log_probs):
        return "processed"
    equal = [first == second for first, second in zip(at_one.tokens, at_half.tokens, strict=False)]
    count = equal.index(False) if False in equal else len(equal)
    sums = [sum(probe.log_probs[:count]) for probe in (at_one, at_half)]
    if sums[0] > -CERTAIN:
        return "unknown"
    return "raw" if sums[1] / sums[0] > SAME else "tempered"


def check_probes(config: Config, url: str, owner: str, at_one: Probe, at_half: Probe) -> None:
    """Checks that log-probs are of the full softmax at the temperature of the config, and that greedy tokens are.

    Args:
      config: has the temperature and the cuts.
      url: of the server, for messages.
      owner: the server program as its list of models names it, such as "vllm".
      at_one: the probe at temperature 1.
      at_half: the probe at temperature 0.5.

    Raises:
      UserError: they are not.
    """
    section = config.rollout
    temperature = config.temperature
    if missing := sum(map(math.isinf, at_one.log_probs)):
        raise UserError(
            f"rollout.source: {missing} of the {len(at_one.tokens)} most probable tokens have no log-prob in the "
            f"answer of {url} (null, or a floor such as -9999); use a server that returns them, or set "
            "rollout.record_log_probs=false"
        )
    _check_most_probable(url, owner, at_one)
    kind = log_prob_kind(at_one, at_half)
    cut = section.top_k > 0 or section.top_p < 1 or section.min_p > 0
    off = "set rollout.record_log_probs=false"
    if temperature != 1 and kind in ("raw", "unknown"):
        got = f"temperature: got {temperature:g}, but"
        if kind == "unknown":
            raise UserError(
                f"{got} {url} does not show at which temperature its log-probs are: it answers a greedy request with "
                f"other tokens, or with certain ones, each time; set temperature=1, or {off}"
            )
        remedy = _advice(owner, "temperature") if not cut else "leave out rollout.top_k, top_p and min_p"
        raise UserError(f"{got} the log-probs of {url} are those at temperature 1; {remedy}, or {off}")
    if cut and kind == "processed":
        raise UserError(
            f"rollout.top_k, top_p, min_p: the log-probs of {url} are those after the cut; "
            f"{_advice(owner, 'uncut')}{'' if temperature == 1 else ' and set temperature=1'}, or {off}"
        )


def _check_most_probable(url: str, owner: str, probe: Probe) -> None:
    for number, (token, log_prob, largest) in enumerate(
        zip(probe.tokens, probe.log_probs, probe.largest, strict=False), start=1
    ):
        if log_prob < largest - NOT_THE_MOST_PROBABLE:
            raise UserError(
                f"rollout.source: {url} does not sample from the distribution of its log-probs: token {number} of a "
                f"greedy request (top_k 1) is {token} of log-prob {log_prob:.4g}, although another has {largest:.4g}; "
                "it applies a penalty, a bias or a grammar that the request does not ask for, or ignores top_k; "
                f"{_advice(owner, 'defaults')}"
            )


def _advice(owner: str, need: str) -> str:
    """Returns what to start the server with; of all servers if it is none of them."""
    known: list[dict[str, str]] = [_ADVICE[owner]] if owner in _ADVICE else list(_ADVICE.values())
    return ", ".join(advice[need] for advice in known)


def second_prompt(first: Sequence[int]) -> list[int]:
    """Returns the first prompt, its greedy completion, and the first prompt again: the same tokens are due once more.

    A penalty would take others, although all of them are as probable as before.
    """
    return [*FIRST_PROMPT, *first, *FIRST_PROMPT]


def probe_body(body: dict[str, Any], config: Config, prompt: Sequence[int], temperature: float) -> dict[str, Any]:
    """Makes a probe of a request; `second_prompt` and its completion together are as long as a row of the config."""
    longest = max(config.data.row_length(), LEAST_LENGTH)
    tokens = min(PROBED_TOKENS, (longest - 2 * len(FIRST_PROMPT)) // 2)
    greedy = body | GREEDY | {"prompt": list(prompt), "temperature": temperature, "max_tokens": tokens}
    return {name: value for name, value in greedy.items() if name != "stop"}
