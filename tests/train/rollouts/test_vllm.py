"""The client against what a real vLLM said: its requests have not changed, and its log-probs are the trainer's.

`tests/goldens/vllm/record.py` made the exchanges; the weights are drawn again here, so that vLLM's log-probs are held
to the trainer's without a vLLM.
"""

import copy
import dataclasses
import json
import threading
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.flax import load_file

from tests.goldens.vllm import record, tiny
from tests.train.rollouts.fake_server import PROBES, Answer, serving
from train.config.errors import UserError
from train.models import Decoder, ExpertsConfig, LayerKind, LoraConfig
from train.rollouts.server import Client, ServerSource
from train.rollouts.server.answers import Requested, read_answer
from train.rollouts.server.control import Server, Sglang, Vllm
from train.rollouts.server.engines import Engines
from train.rollouts.server.source import row_seeds
from train.rollouts.source import SourceError

EXCHANGES = json.loads(record.FIXTURE.read_text())


NAMES = ("lora_name", "new_version")
"""Fields of requests with names that answers repeat."""


def without_paths(body: dict | None) -> dict:
    """A request without what differs from run to run: names of adapters and folders."""
    body = copy.deepcopy(body) or {}
    for name in (*NAMES, "lora_path", "kwargs"):
        body.pop(name, None)
    if body.get("model") != tiny.NAME:
        body.pop("model", None)
    return body


class ReplayedServer:
    """Answers each request as vLLM did; one that was not recorded is refused, and each is answered once."""

    def __init__(self, exchanges: list[dict]) -> None:
        self.left, self._lock = list(exchanges), threading.Lock()
        self._names: dict[str, str] = {}

    def __call__(self, path: str, body: dict) -> Answer:
        with self._lock:
            for said in self.left:
                if said["path"] == path and without_paths(said["request"]) == without_paths(body):
                    self.left.remove(said)
                    self._names |= {said["request"][name]: body[name] for name in NAMES if name in body}
                    response = said["response"]
                    for recorded, name in self._names.items():
                        response = response.replace(recorded, name)
                    return said["status"], response
        return 418, f"not recorded: {path} {without_paths(body)}"


CLIENTS: list[Client] = []


@pytest.fixture(autouse=True)
def _close_clients():
    yield
    while CLIENTS:
        CLIENTS.pop().close()


def client_of() -> Client:
    """A client that is closed after the test."""
    CLIENTS.append(Client(timeout=20, retries=0))
    return CLIENTS[-1]


@pytest.mark.parametrize("name", record.SCENARIOS)
def test_log_probs_of_vllm_equal_the_trainer(name):
    replay = ReplayedServer(EXCHANGES[name])
    with serving(replay) as url:
        played = record.play(name, client_of(), url)
    assert not replay.left, "something that was asked is not asked any more"
    for step, (context, policy, completions) in enumerate(played):
        assert record.log_prob_error(context, completions, policy) < record.ALLOWED
        other = played[1 - step][1]
        assert record.log_prob_error(context, completions, other) > 1
        assert not completions.finished.all()
        assert completions.fields["rollout_log_probs"][~completions.completion_mask].max() == 0


def test_stop_texts_end_their_completion_inclusively():
    replay = ReplayedServer(EXCHANGES["sampling"])
    with serving(replay) as url:
        (context, _, completions), _ = record.play("sampling", client_of(), url)
    stops, eos = context.config.rollout.stop, context.tokenizer.eos_ids
    assert completions.finished.any()
    for row, text in enumerate(completions.texts):
        ids = completions.tokens[row][completions.completion_mask[row]]
        ended = text.endswith(stops) or ids[-1] in eos
        assert completions.finished[row] == ended
        assert ended or len(ids) == context.config.data.max_completion_length


def test_ending_id_is_part_of_the_completion():
    first = EXCHANGES["others"][0]
    (choice,) = json.loads(first["response"])["choices"]
    answer = read_answer(Requested([1], 4, 264, eos_ids=choice["token_ids"]), first["response"].encode())
    assert (len(answer.completion_ids), len(answer.of_completion("rollout_log_probs")), answer.finished) == (1, 1, True)


def opened(answers: list[dict], *overrides: str) -> ServerSource:
    """A source on a server that says these things."""
    with serving(ReplayedServer(answers)) as url:
        context = tiny.context_of(tiny.config_of(url, *record.SCENARIOS["lora"], *overrides))
        return ServerSource(context, context.config.rollout.source, client_of())


def changed(**changes: object) -> list[dict]:
    """The first exchanges of a recording, with fields of the completion replaced, or removed by None."""
    said = copy.deepcopy(EXCHANGES["lora"])
    probe = next(exchange for exchange in said if exchange["path"] == "/v1/completions")
    answer = json.loads(probe["response"])
    (choice,) = answer["choices"]
    for name, value in changes.items():
        choice[name] = value
        if value is None:
            del choice[name]
    probe["response"] = json.dumps(answer)
    return said


WRONG = {
    "token_ids": (None, r"the answer has no token_ids \(got None\); training needs the ids that were sampled"),
    "logprobs": (None, r"the answer has no logprobs.token_logprobs \(got None\), which are recorded as"),
    "prompt_token_ids": ([9], r"prompt_token_ids of the answer: got \[9\], expected the prompt that was sent, \[0\]"),
    "finish_reason": ("abort", "finish_reason of the answer: got 'abort', expected stop or length"),
}


@pytest.mark.parametrize("field", WRONG)
def test_incomplete_answer_is_an_error_before_the_run(field):
    value, message = WRONG[field]
    with pytest.raises(SourceError, match=message):
        opened(changed(**{field: value}))


def test_invalid_or_excess_ids_are_errors():
    with pytest.raises(SourceError, match="token_ids of the answer: got 264, expected an id below 264"):
        opened(changed(token_ids=[264]))
    with pytest.raises(
        SourceError, match="token_ids of the answer: got 8 tokens, expected at least 1, at most max_tokens = 7"
    ):
        opened(changed(token_ids=[1] * 8))
    both = changed(token_ids=[1], logprobs={"token_logprobs": [-1.0, -2.0]})
    with pytest.raises(SourceError, match=r"token_logprobs of the answer: got \[-1.0, -2.0\], expected 1 numbers"):
        opened(both)


def test_model_missing_on_the_server_is_named():
    with pytest.raises(UserError, match=r"rollout\.source\.model: got 'other', but http.* serves: tiny"):
        opened(EXCHANGES["lora"], "rollout.source.model=other")


def test_log_probs_of_another_kind_are_refused():
    """vLLM's are those at temperature 1 unless it is told otherwise; its others are those after the cuts."""
    with pytest.raises(UserError, match=r"temperature: got 0.6, but .*--logprobs-mode processed_logprobs, or set"):
        opened(EXCHANGES["lora"], "temperature=0.6")
    opened(EXCHANGES["lora"], "rollout.top_k=3")
    with pytest.raises(UserError, match=r"top_k, top_p, min_p: .* those after the cut; start vLLM with .*raw_logprobs"):
        opened(EXCHANGES["tempered"], "rollout.top_k=3")
    opened(EXCHANGES["tempered"], "temperature=0.6")


def test_vllm_refusal_is_reported_with_the_remedy():
    endpoints = Vllm()

    def post(url: str, path: str, body: dict) -> None:
        client = client_of()
        client.run(endpoints._post(Server(client, url), path, body))

    with serving(ReplayedServer(EXCHANGES["others"])) as url:
        with pytest.raises(SourceError, match="refused with status 404: The model `nobody` does not exist"):
            client_of().post(f"{url}/v1/completions", {"model": "nobody", "prompt": [1], "max_tokens": 1}, bytes)
        with pytest.raises(SourceError, match=r"No adapter found for .*rollout.source.folder has to be a path that"):
            post(url, "/v1/load_lora_adapter", {"lora_name": "x", "lora_path": "/nowhere"})
    missing = '{"detail":"Not Found"}'
    with serving(lambda path, body: (404, missing)) as url:
        with pytest.raises(SourceError, match="start vLLM with --enable-lora and VLLM_ALLOW_RUNTIME"):
            post(url, "/v1/load_lora_adapter", {})
        with pytest.raises(SourceError, match="start vLLM with VLLM_SERVER_DEV_MODE=1"):
            post(url, "/pause", {})
        client = client_of()
        with pytest.raises(SourceError, match=r"Not Found'}$"):
            client.run(Sglang().pause(Server(client, url), keep=False))


@pytest.mark.parametrize(
    ("settings", "dtype"),
    [
        ((), np.dtype("float32")),
        (("model.dtype=bfloat16",), jnp.bfloat16),
        (("rollout.dtype=bfloat16",), jnp.bfloat16),
        (("model.dtype=bfloat16", "rollout.dtype=float32"), np.dtype("float32")),
    ],
)
def test_weights_are_sent_in_the_dtype_of_the_sampler(settings, dtype):
    """Half of the bytes, and the values that a server rounds to."""
    from train.rollouts.server.weights import make_sync

    sent = []

    def answer(path: str, body: dict) -> Answer:
        if path == "/collective_rpc":
            (file,) = Path(body["kwargs"]["weights_path"]).glob("*.safetensors")
            sent.append({name: np.asarray(array) for name, array in load_file(file).items()})
        return 200, "{}"

    with serving(answer) as url:
        context = tiny.context_of(tiny.config_of(url, "model.tie_embeddings=false", *settings))
        policy = tiny.policy_of(context, 0)
        sync = make_sync(Engines(client_of(), context.config.rollout.source), context)
        sync.load(policy, 0)
        sync.close()
    (arrays,) = sent
    assert {array.dtype for array in arrays.values()} == {np.dtype(dtype)}
    expected = np.asarray(policy.params["embed_tokens"]["embedding"].astype(dtype))
    np.testing.assert_array_equal(arrays["model.embed_tokens.weight"], expected)


def test_weights_of_a_tied_head_are_refused():
    context = tiny.context_of(tiny.config_of("http://unused"))
    with pytest.raises(UserError, match=r"rollout\.source\.sync: got weights, but the model ties its LM head"):
        ServerSource(context, context.config.rollout.source, client_of())


def test_adapters_of_experts_are_refused():
    from train.rollouts.server.weights import make_sync

    context = tiny.context_of(tiny.config_of("http://unused", "rollout.source.sync=lora", "lora={rank: 2}"))
    mixture = {"pattern": (LayerKind(mlp="experts"),), "experts": ExpertsConfig(2, 1, 8)}
    model = Decoder(dataclasses.replace(context.model.config, **mixture, lora=LoraConfig(2, 4.0, ("q_proj", "gate"))))
    with pytest.raises(UserError, match=r"got lora with gate of a mixture of experts .* set it to weights"):
        make_sync(Engines(client_of(), context.config.rollout.source), dataclasses.replace(context, model=model))


def test_weights_with_a_router_bias_are_refused():
    from train.rollouts.server.weights import make_sync

    context = tiny.context_of(tiny.config_of("http://unused"))
    mixture = {"pattern": (LayerKind(mlp="experts"),), "experts": ExpertsConfig(2, 1, 8, choice_bias=True)}
    shape = dataclasses.replace(context.model.config, tie_embeddings=False, **mixture)
    context = dataclasses.replace(context, model=Decoder(shape))
    with pytest.raises(
        UserError, match=r"got weights with routing\.bias_update_rate > 0, but no server reads the biases"
    ):
        make_sync(Engines(client_of(), context.config.rollout.source), context)


def test_rows_are_prompts_completions_and_log_probs():
    """Against the recorded text itself, taken apart in another way."""
    said = [exchange for exchange in EXCHANGES["lora"] if exchange["path"] == "/v1/completions"][PROBES:]
    step, rows = 1, {}
    for exchange in said[len(said) // 2 :]:
        (choice,) = json.loads(exchange["response"])["choices"]
        prompt, log_probs = exchange["request"]["prompt"], choice["logprobs"]["token_logprobs"]
        rows[exchange["request"]["seed"]] = prompt, choice["token_ids"], log_probs
    replay = ReplayedServer(EXCHANGES["lora"])
    with serving(replay) as url:
        context, _, completions = record.play("lora", client_of(), url)[step]
    request = tiny.request_of(context, step, record.FIRST_KEYS["lora"] + step)
    expected = [rows[seed] for seed in row_seeds(request.key, len(rows))]
    prompts = [list(context.tokenizer.prompt_ids(example)) for example in request.examples]
    assert [prompt for prompt, *_ in expected] == [ids for ids in prompts for _ in range(tiny.SAMPLES)]
    for row, (prompt, ids, log_probs) in enumerate(expected):
        real, completion = completions.token_mask[row], completions.completion_mask[row]
        assert completions.tokens[row][real].tolist() == [*prompt, *ids]
        assert completions.tokens[row][completion].tolist() == ids
        np.testing.assert_allclose(completions.fields["rollout_log_probs"][row][completion], log_probs, rtol=1e-6)
