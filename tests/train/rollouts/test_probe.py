"""Probes of a server before a run: the kind of its log-probs, and whether it samples as it is asked to."""

import contextlib

import pytest

from tests import tiny
from tests.train.rollouts.fake_server import PROBES, serving
from tests.train.rollouts.toy_server import ToyServer
from train.config.errors import UserError
from train.rollouts.open import open_source
from train.rollouts.server.probe import Probe, log_prob_kind
from train.rollouts.source import Completions, Request

SOURCE = "rollout.source={{type: openai, url: '{}', model: m, sync: none, retries: 0}}"
COLD, CUT, UNRECORDED = "temperature=0.6", "rollout.top_k=20", "rollout.record_log_probs=false"


def sample(server: ToyServer, *options: str) -> Completions:
    with serving(server) as url:
        context = tiny.context_of(tiny.config_of(SOURCE.format(url), *options))
        with contextlib.closing(open_source(context)) as source:
            return tiny.sampled(context, source, Request.of(context, 0))


ACCEPTED = {
    "raw": [(), (CUT,)],
    "tempered": [(), (COLD,), (CUT,), (COLD, CUT)],
    "processed": [(), (COLD,)],
}
"""Log-probs of the full softmax at the temperature of the config."""


@pytest.mark.parametrize(("kind", "options"), [(kind, options) for kind in ACCEPTED for options in ACCEPTED[kind]])
def test_log_probs_of_the_policy_are_accepted(kind, options):
    assert (sample(ToyServer(kind), *options).fields["rollout_log_probs"] <= 0).all()


REFUSED = [
    (
        "raw",
        "vllm",
        (COLD,),
        r"^temperature: got 0\.6, but .* are those at temperature 1; start vLLM with .* processed_log",
    ),
    ("raw", "sglang", (COLD,), r"are those at temperature 1; start SGLang without SGLANG_RETURN_ORIGINAL_LOGPROB"),
    ("raw", "other", (COLD,), r"start vLLM with --logprobs-mode processed_logprobs, start SGLang without SGLANG_RET"),
    (
        "raw",
        "vllm",
        (COLD, CUT),
        r"are those at temperature 1; leave out rollout\.top_k, top_p and min_p, or set rollout",
    ),
    (
        "processed",
        "vllm",
        (CUT,),
        r"^rollout\.top_k, top_p, min_p: .* those after the cut; start vLLM with .* raw_logprobs",
    ),
    ("processed", "vllm", (COLD, CUT), r"start vLLM with --logprobs-mode raw_logprobs and set temperature=1, or set"),
]


@pytest.mark.parametrize(("kind", "owner", "options", "message"), REFUSED)
def test_other_log_probs_are_refused_with_the_flag(kind, owner, options, message):
    with pytest.raises(UserError, match=message):
        sample(ToyServer(kind, owner=owner), *options)
    sample(ToyServer(kind, owner=owner), *options, UNRECORDED)


def test_penalty_of_a_server_is_refused():
    """Raw log-probs are those from before it: only the greedy tokens show it."""
    for forced in ({"repetition_penalty": 1.05}, {"repetition_penalty": 1.3}, {"top_k": -1}):
        with pytest.raises(UserError, match=r"does not sample from the distribution of its log-probs: token \d+ of a"):
            sample(ToyServer(forced=forced), "data.max_prompt_length=60")
    with pytest.raises(UserError, match=r"or ignores top_k; start SGLang with --sampling-defaults openai"):
        sample(ToyServer(owner="sglang", forced={"repetition_penalty": 1.1}))


def test_defaults_of_a_server_are_not_used():
    """They are those of `generation_config.json`; a request names every field."""
    defaults = {"repetition_penalty": 1.3, "temperature": 0.1, "top_k": 1, "top_p": 0.1, "min_p": 0.5}
    plain, other = sample(ToyServer()), sample(ToyServer(defaults=defaults))
    assert (plain.tokens == other.tokens).all()


def test_probes_repeat_themselves_within_a_row():
    """A penalty takes other tokens where all of them are due once more; the end of a text ends nothing."""
    server = ToyServer()
    sample(server, "rollout.stop=[x]", "data.max_prompt_length=20")
    probes = server.bodies[:PROBES]
    assert [body["temperature"] for body in probes] == [1.0, 1.0, 0.5]
    first, *repeated = (body["prompt"] for body in probes)
    assert first == [0]
    for prompt in repeated:
        assert prompt[0] == prompt[-1] == 0
        assert len(prompt) - 2 == probes[0]["max_tokens"]
    for body in probes:
        assert len(body["prompt"]) + body["max_tokens"] <= 20 + tiny.NEW_TOKENS
        assert (body["ignore_eos"], body["stop_token_ids"], body["top_k"]) == (True, [], 1)
        assert "stop" not in body


def test_kind_follows_from_two_temperatures():
    def kind(one: list[float], half: list[float], ids: tuple[list[int], list[int]] = ([1, 2], [1, 2])) -> str:
        return log_prob_kind(Probe(ids[0], one, []), Probe(ids[1], half, []))

    # Equal within rounding, also where a token is certain.
    assert kind([-1.0, 0.0], [-1.01, 0.0]) == "raw"
    assert kind([-1.0, -0.1], [-0.4, -0.01]) == "tempered"
    assert kind([0.0, 0.0], [0.0, 0.0]) == "processed"
    # After the first other token the prefixes differ.
    assert kind([-1.0, -2.0], [-1.0, -0.1], ([1, 2], [1, 3])) == "raw"
    assert kind([-1.0, -2.0], [-0.4, -2.0], ([1, 2], [4, 2])) == "unknown"
    assert kind([-1e-5, -1e-5], [-1e-9, -1e-9]) == "unknown"


def test_unknown_kind_is_refused_at_other_temperatures():
    certain = {"token_logprobs": [-1e-6] * 8}

    class Certain(ToyServer):
        def __call__(self, path: str, body: dict):
            status, text = super().__call__(path, body)
            if path == "/v1/models":
                return status, text
            import json

            answer = json.loads(text)
            answer["choices"][0]["logprobs"] = {"token_logprobs": certain["token_logprobs"][: body["max_tokens"]]}
            return status, json.dumps(answer)

    with pytest.raises(UserError, match=r"does not show at which temperature its log-probs are"):
        sample(Certain(), COLD)


def test_floors_of_greedy_tokens_are_refused():
    import json

    class OnlyFloors(ToyServer):
        def __call__(self, path: str, body: dict):
            status, text = super().__call__(path, body)
            return status, text if path == "/v1/models" else json.dumps(
                json.loads(text, parse_float=lambda number: -9999.0)
            )

    with pytest.raises(UserError, match=r"7 of the 7 most probable tokens have no log-prob in the answer of http"):
        sample(OnlyFloors())
