"""Experts in the answers of servers: every documented form gives the same routes, and a damaged one is named.

`tests/goldens/server_routes.py` made the answers from the pages of vLLM and SGLang.
"""

import base64
import copy
import dataclasses
import json
from contextlib import closing
from pathlib import Path

import numpy as np
import pytest

from tests import tiny
from tests.goldens.server_routes import npy
from tests.train.models import test_experts
from tests.train.rollouts.fake_server import PROBES, Answer, Digits, serving
from train.config.errors import UserError
from train.config.schema import Checkpoint
from train.data.tokenizers import ByteTokenizer
from train.models import ExpertsConfig
from train.rollouts.open import open_source, open_stream
from train.rollouts.server.answers import AnswerError, Requested, read_answer
from train.rollouts.server.routes import decode_routes
from train.rollouts.source import Request, SourceError
from train.sequences.token_fields import ROUTES, TOKEN_FIELDS
from train.weights.orbax import RunCheckpoints

RECORDED = json.loads((Path(__file__).parents[2] / "goldens" / "server_routes.json").read_text())
PROMPT, ROUTED = RECORDED["prompt"], [np.array(routes) for routes in RECORDED["routes"]]
SHAPE = dataclasses.replace(test_experts.SHAPE, experts=ExpertsConfig(count=6, active=2, width=8))


def read(answer: dict) -> list[np.ndarray]:
    """The routes of each completion, as if each had been requested alone."""
    requested = Requested(PROMPT, 4, SHAPE.vocab_size, eos_ids=(0,), routes_of=SHAPE)
    alone = [json.dumps(answer | {"choices": [choice]}).encode() for choice in answer["choices"]]
    return [read_answer(requested, content).fields[ROUTES] for content in alone]


@pytest.mark.parametrize("server", RECORDED["answers"])
def test_documented_answer_gives_its_routes(server):
    """The last token, which no server computes, has none."""
    for routes, expected in zip(read(RECORDED["answers"][server]), ROUTED, strict=False):
        assert routes.dtype == np.int16
        np.testing.assert_array_equal(routes[:-1], expected)
        assert (routes[-1] == -1).all()


@pytest.mark.parametrize("dtype", ["u1", "<u2", "<i2", "<i4", ">i4", "<i8"])
def test_dtype_and_layers_come_from_the_value(dtype):
    """With a header or by their number of bytes; as many layers as have experts, or a slot for each layer."""
    routes = ROUTED[0].astype(dtype)
    slots = np.pad(routes, ((0, 0), (1, 0), (0, 0)))
    raw = [encoded(array.tobytes()) for array in (routes, slots)]
    fields = {"data": raw[0], "shape": list(routes.shape), "dtype": dtype, "start": 0}
    for value in (npy(routes), npy(slots), fields, *(raw if dtype[0] != ">" else ())):
        np.testing.assert_array_equal(decode_routes(value, len(routes), SHAPE), ROUTED[0])


def test_omitted_prompt_tokens_have_no_routes():
    """By the offset of an answer; without one, fewer tokens are an error."""
    answer = copy.deepcopy(RECORDED["answers"]["vllm 0.22"])
    for choice, routes in zip(answer["choices"], ROUTED, strict=True):
        choice |= {"routed_experts": npy(routes[3:]), "routed_experts_prompt_start": 3}
    sglang = copy.deepcopy(RECORDED["answers"]["sglang"])
    part = np.pad(ROUTED[0][3:], ((0, 0), (1, 0), (0, 0))).astype("<i4").tobytes()
    sglang["sglext"] = {"routed_experts": encoded(part), "routed_experts_start_len": 3}
    fields = {"data": npy(ROUTED[0][3:]), "start": 3}
    for routes in (*read(answer), *read(sglang)):
        assert (routes[:3] == -1).all()
        assert (routes[3:-1] >= 0).all()
    del answer["choices"][0]["routed_experts_prompt_start"]
    with pytest.raises(AnswerError, match="routed_experts of the answer: got 3 tokens, expected 6"):
        read(answer)
    with pytest.raises(ValueError, match="got the dtype None, expected the name of integers"):
        decode_routes(fields, 6, SHAPE)


def test_cached_prompt_tokens_of_lists_stay_unknown():
    answer = copy.deepcopy(RECORDED["answers"]["vllm 0.21"])
    answer["prompt_routed_experts"][:2] = [[[-1, -1]] * 2] * 2
    # Some releases have a row for the last token as well.
    answer["choices"][0]["routed_experts"].append([[0, 0]] * 2)
    first, second = read(answer)
    assert (first[:2] == -1).all()
    np.testing.assert_array_equal(first[2:-1], ROUTED[0][2:])
    np.testing.assert_array_equal(second[2:-1], ROUTED[1][2:])
    assert (first[-1] == -1).all()


ROUTES_0 = ROUTED[0].astype(np.uint8)
RAW = ROUTES_0.astype("<i4").tobytes()
OBJECTS = b"\x93NUMPY\1\0\x46\0" + b"{'descr': '|O', 'fortran_order': False, 'shape': (1,), }".ljust(70)


def encoded(data: bytes) -> str:
    return base64.b64encode(data).decode()


DAMAGED = {
    "layers": (npy(ROUTES_0[:, :1]), "got 1 layers x 2 experts, expected 2 x 2; only layers with experts count"),
    "more layers": (npy(np.pad(ROUTES_0, ((0, 0), (1, 1), (0, 0)))), "got 4 layers x 2 experts, expected 2 x 2"),
    "experts": (npy(ROUTES_0[..., :1]), "got 2 layers x 1 experts, expected 2 x 2"),
    "tokens": (npy(ROUTES_0[:-1]), "got 5 tokens, expected 6; the last one of a completion has none"),
    "outside": (npy(ROUTES_0 + 250), r"got the experts \[.*\] at token 0, layer 1, expected numbers below 6"),
    "negative": ((ROUTED[0] - 6).tolist(), r"got the experts .* expected numbers below 6"),
    "truncated": (npy(ROUTES_0)[:-4], r"got 2. bytes, expected 24 of uint8 \[6, 2, 2\]"),
    "header": (encoded(b"\x93NUMPY\1\0"), r"got a \.npy file with a damaged header"),
    "objects": (encoded(OBJECTS), "got the dtype object, expected integers"),
    "floats": (npy(ROUTED[0].astype(np.float32)), "got the dtype float32, expected integers"),
    "raw truncated": (encoded(RAW[:-3]), "got 93 bytes, expected integers of 1, 2, 4 or 8 bytes for 6 tokens"),
    "raw half": (encoded(RAW[:48]), "got 48 bytes, .*; every second number is 0, so that half of the tokens may be"),
    "base64": ("%%", "got a text of 2 characters that is no base64"),
    "ragged": ([[[1, 2]], [[1]]], "got lists of unequal lengths"),
    "numbers": (7, "got int, expected lists"),
}


@pytest.mark.parametrize("damage", DAMAGED)
def test_damaged_routes_name_field_and_problem(damage):
    value, message = DAMAGED[damage]
    answer = copy.deepcopy(RECORDED["answers"]["vllm 0.22"])
    answer["choices"][0]["routed_experts"] = value
    with pytest.raises(AnswerError, match=f"^routed_experts of the answer: {message}"):
        read(answer)


COUNT, ACTIVE = 6, 2
OPTIONS = (f"model.experts={{count: {COUNT}, active: {ACTIVE}, width: 8}}", "optim.share_prompts=false")
SOURCE = "rollout.source={{type: openai, url: '{}', model: m, sync: none, retries: 0}}"


class RoutedDigits:
    """Answers as vLLM or SGLang do, with the experts (token + layer + 0 and 1) of each id; some answers have none."""

    def __init__(self, server: str, routes: int = 10**9) -> None:
        self.digits, self.server, self.left = Digits(ByteTokenizer().eos_id), server, routes

    def __call__(self, path: str, body: dict) -> Answer:
        status, text = self.digits(path, body)
        answer = json.loads(text)
        if path == "/v1/models":
            return status, text
        self.left -= 1
        for choice in answer["choices"] if self.left >= 0 else ():
            routes = routes_of([*body["prompt"], *choice["token_ids"]][:-1])
            if self.server == "vllm":
                choice["routed_experts"] = npy(routes.astype(np.uint8))
            elif body["return_routed_experts"]:
                answer["sglext"] = {"routed_experts": encoded(routes.astype("<i4").tobytes())}
        return status, json.dumps(answer)


def routes_of(ids: list[int]) -> np.ndarray:
    numbers = np.add.outer(np.add.outer(ids, np.arange(tiny.LAYERS)), np.arange(ACTIVE))
    return np.sort(numbers % COUNT, axis=-1)


def sample(server: RoutedDigits, *options: str):
    with serving(server) as url:
        context = tiny.context_of(tiny.config_of(*OPTIONS, SOURCE.format(url), *options))
        with closing(open_source(context)) as source:
            completions = tiny.sampled(context, source, Request.of(context, 0))
            return completions, tiny.rollout_of(context, completions)


@pytest.mark.parametrize("server", ["vllm", "sglang"])
def test_server_source_records_routes_of_its_tokens(server):
    completions, rollout = sample(RoutedDigits(server))
    for tokens, mask, routes in zip(
        completions.tokens, completions.token_mask, completions.fields[ROUTES], strict=True
    ):
        real = np.flatnonzero(mask)
        np.testing.assert_array_equal(routes[real[:-1]], routes_of(tokens[real[:-1]].tolist()))
        assert (routes[real[-1]] == -1).all()
    np.testing.assert_array_equal(rollout.batch.fields[ROUTES], completions.fields[ROUTES])


def test_batch_ahead_is_saved_with_its_routes(tmp_path):
    """The checkpoint has the rows that were requested, and a resumed run takes them from there."""
    with serving(RoutedDigits("vllm")) as url:
        context = tiny.context_of(tiny.config_of(*OPTIONS, SOURCE.format(url), "rollout.ahead=1"))
        with closing(open_stream(context)) as stream, closing(RunCheckpoints(tmp_path, Checkpoint())) as checkpoints:
            state = tiny.state_of(tiny.config_of(), context.optimizer)
            stream.attach(checkpoints, 0)
            stream.update(None, 0)
            stream.batch(0)
            batch = stream.saved(1)["1"]
            checkpoints.save(state, 1)
            checkpoints.wait()
            resumed = open_stream(context)
            resumed.attach(checkpoints, 1)
            restored = resumed.batch(1)
            resumed.close()
    assert (np.asarray(batch["fields"][ROUTES]) >= 0).any()
    assert restored.fields.keys() == batch["fields"].keys()
    for name, array in restored.fields.items():
        assert array.dtype == TOKEN_FIELDS[name].dtype
        np.testing.assert_array_equal(array, batch["fields"][name])


def test_rows_without_routes_are_named_unless_chosen():
    with pytest.raises(UserError, match=r"routing\.replay: got rollout, but .* --enable-return-routed-experts"):
        sample(RoutedDigits("vllm", routes=0))
    with pytest.raises(SourceError, match=r"routed_experts: row \d has no experts for . of its . tokens; set routing"):
        sample(RoutedDigits("vllm", routes=PROBES + 1))
    completions, _ = sample(RoutedDigits("vllm", routes=0), "routing.missing=choose")
    assert (completions.fields[ROUTES] == -1).all()
    without, _ = sample(RoutedDigits("vllm", routes=0), "routing.replay=none")
    assert ROUTES not in without.fields
