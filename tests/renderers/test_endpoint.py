"""An endpoint whose chats have the form of a family of the package `renderers`: ids that stay, texts that stay text."""

import json
import time
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from tests import tiny
from tests.renderers.test_rendered import CALL, SYSTEM, TOOL, LetterEngine, make_qwen3
from tests.train.data.test_tokenizer_folder import FOLDERS
from tests.train.rollouts.endpoint.fakes import running
from tests.train.rollouts.endpoint.test_app import ask, events_of
from tests.train.rollouts.episodes.test_source import ScriptClock
from train.data.tasks import Example, Task
from train.data.tokenizers import load_tokenizer
from train.data.tokenizers.files import load_folder
from train.data.tokenizers.rendered import RenderedTokenizer, _RendererTokenizer
from train.rollouts.endpoint import source as endpoint_source
from train.rollouts.endpoint.sessions import SequenceLengths
from train.rollouts.endpoint.source import EndpointSource
from train.rollouts.source import Request
from train.run.setup import tell_tools

LENGTHS = SequenceLengths(prompt=800, completion=600)
FIELD = "rollout.source.renderer"
USER = {"role": "user", "content": "How many?"}
THOUGHT = f"<think>\nhm\n</think>\n\nLet me see.\n{CALL}"
AGENT = """
import json
import urllib.request

def play(row, base_url, api_key, model):
    tool = {"type": "function", "function": {"name": "calc", "description": "Computes.", "parameters": {
        "type": "object", "properties": {"text": {"type": "string"}}, "required": ["text"]}}}
    headers = {"Content-Type": "application/json", "Authorization": "Bearer " + api_key}
    messages = [{"role": "user", "content": row["prompt"]}]
    for _ in range(3):
        body = json.dumps({"messages": messages, "tools": [tool]}).encode()
        request = urllib.request.Request(base_url + "/chat/completions", body, headers)
        with urllib.request.urlopen(request, timeout=60) as answer:
            said = json.load(answer)["choices"][0]["message"]
        if not said.get("tool_calls"):
            return float(said["content"] == "6")
        messages += [said, {"role": "tool", "tool_call_id": said["tool_calls"][0]["id"], "content": "6 <|im_end|>"}]
"""


@pytest.fixture(scope="module")
def qwen3(tmp_path_factory):
    folder = load_folder(make_qwen3(tmp_path_factory.mktemp("qwen3")))
    return RenderedTokenizer(folder, "qwen3", {}, FIELD)


def chat(served, messages, **options):
    body = {"messages": messages, "tools": [TOOL], "return_token_ids": True, **options}
    return ask(served, "/v1/chat/completions", body, headers={"X-Session-ID": "one"})


def test_chat_of_qwen3_keeps_sampled_ids_and_finds_the_call(qwen3):
    with running(lambda text: "6" if "tool_response" in text else THOUGHT, tokenizer=qwen3, lengths=LENGTHS) as served:
        _, first = chat(served, [USER])
        (choice,) = first["choices"]
        assert first["prompt_token_ids"] == qwen3.conversation_ids([USER], [TOOL])
        assert choice["finish_reason"] == "tool_calls"
        assert choice["message"]["content"] == "<think>\nhm\n</think>\n\nLet me see."
        (call,) = choice["message"]["tool_calls"]
        assert (call["function"]["name"], json.loads(call["function"]["arguments"])) == ("calc", {"text": "2*3"})
        result = {"role": "tool", "tool_call_id": call["id"], "content": "6 <|im_end|>"}
        _, second = chat(served, [USER, choice["message"], result])
    before = [*first["prompt_token_ids"], *choice["token_ids"]]
    ids = second["prompt_token_ids"]
    assert ids[: len(before)] == before
    assert qwen3.decode_all(ids[len(before) :]) == (
        "\n<|im_start|>user\n<tool_response>\n6 <|im_end|>\n</tool_response><|im_end|>\n<|im_start|>assistant\n"
    )
    assert ids[len(before) :].count(qwen3._id("<|im_end|>")) == 1
    assert second["choices"][0]["message"] == {"role": "assistant", "content": "6"}


def test_call_within_thinking_is_text_and_streams_as_such(qwen3):
    said = f"<think>\nIs it {CALL}?\n</think>\n\nSeven."
    with running(lambda text: said, tokenizer=qwen3, lengths=LENGTHS) as served:
        _, answer = chat(served, [USER])
        assert answer["choices"][0]["message"] == {"role": "assistant", "content": said}
        _, streamed = chat(served, [USER], stream=True)
        deltas = [event["choices"][0]["delta"] for event in events_of(streamed)]
    assert "".join(delta.get("content", "") for delta in deltas) == said
    assert not any("tool_calls" in delta for delta in deltas)


def test_call_of_llama3_is_found():
    folder = load_folder(FOLDERS / "llama3", arguments={"date_string": "26 Jul 2024"})
    rendered = RenderedTokenizer(folder, "llama-3", {"date_string": "26 Jul 2024"}, FIELD)
    text = '{"name": "calc", "parameters": {"text": "2*3"}}'
    with running(lambda prompt: text, tokenizer=rendered, lengths=LENGTHS) as served:
        (choice,) = chat(served, [USER])[1]["choices"]
    assert choice["message"]["content"] is None
    assert choice["message"]["tool_calls"][0]["function"]["arguments"] == '{"text": "2*3"}'


def test_messages_that_the_family_has_no_form_for_are_refused(qwen3):
    with running(lambda text: "6", tokenizer=qwen3, lengths=LENGTHS) as served:
        status, answer = chat(served, [USER, {"role": "critic", "content": "Sure?"}])
        message = f"{FIELD}: qwen3 has no form for a message of critic"
        assert (status, answer["error"]["param"], answer["error"]["message"]) == (400, "messages", message)
        (choice,) = chat(served, [USER])[1]["choices"]
        status, answer = chat(served, [USER, choice["message"], {"role": "critic", "content": "Sure?"}])
        message = f"{FIELD}: qwen3 does not go on after a sampled reply with messages of critic"
        assert (status, answer["error"]["message"]) == (400, message)
        status, answer = chat(served, [USER, choice["message"], {"role": "user", "content": ""}])
        assert status == 200
        status, answer = chat(served, [USER, choice["message"], {"role": "assistant", "content": "So 6."}, USER])
        message = f"{FIELD}: qwen3 does not go on after a sampled reply with messages of assistant, user"
        assert (status, answer["error"]["message"]) == (400, message)


def test_text_that_divides_others_is_kept_in_the_arguments_of_a_call(qwen3):
    call = {"type": "function", "function": {"name": "calc", "arguments": {"text": "~kljax0~"}}}
    said = [{"role": "user", "content": "<|im_end|>"}, {"role": "assistant", "content": "", "tool_calls": [call]}]
    assert '"~kljax0~"' in qwen3.decode_all(qwen3.conversation_ids(said))


def test_texts_of_control_tokens_stay_text_in_any_thread(qwen3, monkeypatch):
    """Requests are written in several threads at a time, here each piece of them with a pause."""
    controls = " ".join(text for text in qwen3._added.values() if len(text) > 1)
    messages = [[{"role": "user", "content": f"{controls} {n} ~kljax{n % 3}~"}] for n in range(6)]
    expected = [qwen3.conversation_ids(said) for said in messages]
    encode = _RendererTokenizer.encode

    def slowly(*arguments, **options):
        time.sleep(1e-3)
        return encode(*arguments, **options)

    monkeypatch.setattr(_RendererTokenizer, "encode", slowly)
    with ThreadPoolExecutor(6) as threads:
        assert list(threads.map(qwen3.conversation_ids, messages)) == expected


def test_episode_of_an_agent_trains_the_ids_that_were_sampled(tmp_path, monkeypatch):
    (tmp_path / "mine.py").write_text(AGENT)
    (tmp_path / "model").mkdir()
    folder = make_qwen3(tmp_path / "model")
    config = tiny.config_of(
        f"model={{path: '{folder}'}}",
        f"data={{system: '{SYSTEM}', max_prompt_length: 600, max_completion_length: 400}}",
        "rollout={prompts_per_step: 1, samples_per_prompt: 2}",
        f"rollout.source={{type: endpoint, agent: '{tmp_path / 'mine.py'}:play', renderer: qwen3}}",
    )
    tokenizer = tell_tools(config, load_tokenizer(config))
    engine = LetterEngine({}, ScriptClock(), tokenizer)

    def text_of(turn):
        return "6" if "tool_response" in tokenizer.decode_all(turn.ids) else THOUGHT

    monkeypatch.setattr(engine, "text_of", text_of)
    monkeypatch.setattr(endpoint_source, "engine_of_run", lambda context: engine)
    task = Task("sums", [Example("1+2", "6", "6")], [], lambda example, text, finished: {"reward": 1.0})
    context = tiny.context_of(config, model=tiny.model_of(tiny.config_of()), task=task, tokenizer=tokenizer)
    source = EndpointSource(context, config.rollout.source)
    try:
        source.update(None, 3)
        drawn = source.sample(Request.of(context, 0))
    finally:
        source.close()
    # Both episodes are alike: a call, and the answer.
    first, second = engine.drawn[0][1], engine.drawn[-1][1]
    for number in range(2):
        masks = drawn.token_mask[number], drawn.completion_mask[number]
        row, sampled = (np.asarray(drawn.tokens[number])[np.asarray(mask)] for mask in masks)
        assert row.tolist() == [*engine.drawn[-1][0], *second]
        assert sampled.tolist() == [*first, *second]
    assert tokenizer.encode(tokenizer.decode_all(sampled.tolist())) != sampled.tolist()
    assert drawn.rewards["reward"].tolist() == [1.0, 1.0]
