"""Episodes in the form of a family of the package `renderers`: ids that stay, texts that stay text, and calls."""

import json
import re
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests import tiny
from tests.train.data.test_tokenizer_folder import FOLDERS
from tests.train.rollouts.episodes.test_source import SOURCE, ScriptClock, Scripted
from train.config.errors import UserError
from train.data.prompts import keep_solutions
from train.data.tasks import Example, Task
from train.data.tokenizers import encode_continuation, load_tokenizer
from train.data.tokenizers.calls import ToolCall
from train.data.tokenizers.files import load_folder
from train.data.tokenizers.rendered import RenderedTokenizer, read_turn
from train.rollouts.episodes import EpisodeSource
from train.rollouts.episodes import source as episode_source
from train.rollouts.source import Request
from train.run.setup import tell_tools

pytest.importorskip("renderers", reason="make test-renderers has the package")
SYSTEM = "Be brief."
TOOL = {
    "type": "function",
    "function": {
        "name": "calc",
        "description": "Computes.",
        "parameters": {"type": "object", "properties": {"text": {"type": "string"}}, "required": ["text"]},
    },
}
TOKENS = ("<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>")
EXAMPLE = Example("How many?", "", "", messages=(("user", "How many?"),))
CALL = '<tool_call>\n{"name": "calc", "arguments": {"text": "2*3"}}\n</tool_call>'
# That of Qwen 3 for messages of these tests.
QWEN3 = """\
{%- if tools %}
    {{- '<|im_start|>system\\n' + messages[0].content + '\\n\\n# Tools\\n\\n' }}
    {{- 'You may call one or more functions to assist with the user query.\\n\\n' }}
    {{- 'You are provided with function signatures within <tools></tools> XML tags:\\n<tools>' }}
    {%- for tool in tools %}{{- '\\n' }}{{- tool | tojson }}{%- endfor %}
    {{- '\\n</tools>\\n\\nFor each function call, return a json object with function name and arguments ' }}
    {{- 'within <tool_call></tool_call> XML tags:\\n<tool_call>\\n' }}
    {{- '{"name": <function-name>, "arguments": <args-json-object>}\\n</tool_call><|im_end|>\\n' }}
{%- else %}
    {{- '<|im_start|>system\\n' + messages[0].content + '<|im_end|>\\n' }}
{%- endif %}
{%- for message in messages[1:] %}
    {%- if message.role == 'tool' %}
        {{- '<|im_start|>user\\n<tool_response>\\n' + message.content + '\\n</tool_response><|im_end|>\\n' }}
    {%- else %}
        {{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
    {%- if enable_thinking is defined and not enable_thinking %}{{- '<think>\\n\\n</think>\\n\\n' }}{%- endif %}
{%- endif %}
"""


def make_qwen3(folder, template=QWEN3, tokens=TOKENS):
    """Writes the folder chatml with the tokens of tool calls and another template."""
    for file in (FOLDERS / "chatml").iterdir():
        (folder / file.name).write_bytes(file.read_bytes())
    tokenizer = json.loads((folder / "tokenizer.json").read_text())
    last = max(token["id"] for token in tokenizer["added_tokens"])
    first = 1 + max(last, *tokenizer["model"]["vocab"].values())
    kind = {**tokenizer["added_tokens"][0], "special": False}
    tokenizer["added_tokens"] += [{**kind, "id": first + i, "content": text} for i, text in enumerate(tokens)]
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
    (folder / "chat_template.jinja").write_text(template)
    return folder


@pytest.fixture(scope="module")
def qwen3_folder(tmp_path_factory):
    return make_qwen3(tmp_path_factory.mktemp("qwen3"))


@pytest.fixture(scope="module")
def qwen3(qwen3_folder):
    """The tokenizer with its template, and in the form of the family."""
    template = load_folder(qwen3_folder, system=SYSTEM).with_tools([TOOL])
    return template, RenderedTokenizer(template, "qwen3", {})


@pytest.fixture(scope="module")
def llama3():
    template = load_folder(FOLDERS / "llama3", arguments={"date_string": "26 Jul 2024"})
    return template, RenderedTokenizer(template, "llama-3", {"date_string": "26 Jul 2024"})


def replied(tokenizer, text, *, ended=True):
    """The ids of a prompt with a sampled reply."""
    prompt = tokenizer.prompt_ids(EXAMPLE)
    return [*prompt, *encode_continuation(tokenizer, prompt, text), *([tokenizer.eos_ids[0]] if ended else [])]


def test_prompts_of_qwen3_are_those_of_its_template(qwen3):
    template, rendered = qwen3
    assert rendered.prompt_ids(EXAMPLE) == template.prompt_ids(EXAMPLE)
    assert "<tools>" in rendered.decode_all(rendered.prompt_ids(EXAMPLE))
    said = [*template.messages(EXAMPLE), {"role": "assistant", "content": "7"}, {"role": "user", "content": "Sure?"}]
    assert rendered.conversation_ids(said) == template.conversation_ids(said)


@pytest.mark.parametrize("role", ["user", "tool"])
@pytest.mark.parametrize("reply", ["Seven.", CALL, "", "<think>\nhm\n</think>\n\nSeven."])
@pytest.mark.parametrize("ended", [True, False])
def test_observations_of_qwen3_are_those_of_its_template(qwen3, role, reply, ended):
    template, rendered = qwen3
    before = replied(rendered, reply, ended=ended)
    said = (template.messages(EXAMPLE), [{"role": role, "content": "6, and <|im_end|>"}])
    ids = rendered.observation_ids(*said, before=before, tools=[TOOL])
    assert ids == template.observation_ids(*said, before=before, tools=[TOOL])


def test_prompt_without_thinking_is_that_of_the_template(qwen3_folder):
    arguments = {"enable_thinking": False}
    template = load_folder(qwen3_folder, system=SYSTEM, arguments=arguments)
    rendered = RenderedTokenizer(template, "qwen3", arguments)
    assert rendered.prompt_ids(EXAMPLE) == template.prompt_ids(EXAMPLE)
    assert rendered.decode_all(rendered.prompt_ids(EXAMPLE)).endswith("</think>\n\n")


def test_prompts_of_llama3_say_when_knowledge_ends_besides(llama3):
    template, rendered = llama3
    texts = [tokenizer.decode_all(tokenizer.prompt_ids(EXAMPLE)) for tokenizer in llama3]
    assert texts[1] == texts[0].replace("Today Date", "Cutting Knowledge Date: December 2023\nToday Date")
    said = (template.messages(EXAMPLE), [{"role": "user", "content": "and <|eot_id|> apples"}])
    before = replied(rendered, "Seven.")
    assert rendered.observation_ids(*said, before=before) == template.observation_ids(*said, before=before)


def test_a_template_that_writes_prompts_otherwise_is_a_warning(qwen3, llama3, capsys):
    for template, rendered in (qwen3, llama3):
        rendered.with_tools(template.tools).warn_of_template(template)
    (said,) = capsys.readouterr().err.splitlines()
    assert said.startswith("warning: environment.renderer: llama-3 writes a prompt otherwise than the chat template")
    assert "Cutting Knowl" in said


def test_tool_result_of_llama3_is_json_of_another_role(llama3):
    _, rendered = llama3
    observed = [{"role": "tool", "content": 'a "b" <|eot_id|>'}]
    ids = rendered.observation_ids([], observed, before=replied(rendered, "Seven."))
    assert rendered.decode_all(ids) == (
        '<|start_header_id|>ipython<|end_header_id|>\n\n"a \\"b\\" <|eot_id|>"<|eot_id|>'
        "<|start_header_id|>assistant<|end_header_id|>\n\n"
    )
    assert sum(token in rendered._added for token in ids) == 5


@pytest.mark.parametrize("kind", ["qwen3", "llama3"])
@given(data=st.data())
def test_texts_of_control_tokens_stay_text(kind, data, request):
    _, rendered = request.getfixturevalue(kind)
    controls = [text for text in rendered._added.values() if len(text) > 1]
    text = "".join(data.draw(st.lists(st.sampled_from([*controls, "Tom ", "7", "<", "|>", "~kljax0~"]), max_size=5)))
    role = data.draw(st.sampled_from(["user", "tool"]))
    before = replied(rendered, "Tom")
    plain, ids = (
        rendered.observation_ids([], [{"role": role, "content": content}], before=before) for content in ("a", text)
    )
    counts = [sum(token in rendered._added for token in row) for row in (plain, ids)]
    assert counts[0] == counts[1]
    assert text in rendered.decode_all(ids)
    prompts = [rendered.conversation_ids([{"role": "user", "content": content}]) for content in ("a", text)]
    counts = [sum(token in rendered._added for token in row) for row in prompts]
    assert counts[0] == counts[1]


@pytest.mark.parametrize("kind", ["qwen3", "llama3"])
@given(data=st.data())
def test_any_sampled_ids_are_kept(kind, data, request):
    """Ids that no encoder gives, ends within a turn, and thinking that never ends are kept as they were sampled."""
    _, rendered = request.getfixturevalue(kind)
    renderer = rendered._renderer
    turns = data.draw(st.lists(st.lists(st.integers(0, 349), max_size=6), min_size=1, max_size=3))
    ids = rendered.prompt_ids(EXAMPLE)
    for turn in turns:
        ids = [*ids, *turn, *data.draw(st.sampled_from([[], [rendered.eos_ids[0]]]))]
        seen = []
        original = renderer.bridge_to_next_turn

        def bridge(prompt, completion, messages, original=original, seen=seen, **rest):
            bridged = original(prompt, completion, messages, **rest)
            seen.append((prompt + completion, bridged))
            return bridged

        renderer.bridge_to_next_turn = bridge
        try:
            added = rendered.observation_ids([], [{"role": "tool", "content": "6"}], before=ids, tools=[TOOL])
        finally:
            del renderer.bridge_to_next_turn
        before, bridged = seen[-1]
        assert bridged.token_ids == [*before, *added]
        assert len(seen) == 2 or before == ids
        ids = [*ids, *added]


def test_package_alone_drops_sampled_ids_and_makes_control_tokens(qwen3):
    """Why it gets one sampled id as a completion, and texts in parts."""
    _, rendered = qwen3
    end = rendered.eos_ids[0]
    bridge = rendered._renderer.bridge_to_next_turn
    ends = []
    for text in ("a", "<|im_end|>"):
        ids = bridge([5], [6, end, 7], [{"role": "tool", "content": text}]).token_ids
        assert ids[:3] == [5, 6, end]
        assert ids[3] != 7
        ends.append(ids.count(rendered._id("<|im_end|>")))
    assert ends[1] == ends[0] + 1


def test_turn_that_ended_while_thinking_goes_on(qwen3):
    template, rendered = qwen3
    before = replied(rendered, "<think>\nhm")
    said = (template.messages(EXAMPLE), [{"role": "user", "content": "Well?"}])
    assert rendered.observation_ids(*said, before=before) == template.observation_ids(*said, before=before)


def found(tokenizer, text):
    prompt = tokenizer.prompt_ids(EXAMPLE)
    ids = [*encode_continuation(tokenizer, prompt, text), tokenizer.eos_ids[0]]
    return read_turn(tokenizer, ["calc"], prompt=prompt, ids=ids, text=text, tools=[TOOL]).calls


@pytest.mark.parametrize(
    ("text", "calls"),
    [
        (CALL, [ToolCall("calc", {"text": "2*3"})]),
        (f"First.\n{CALL}\n{CALL}", [ToolCall("calc", {"text": "2*3"})] * 2),
        ("Seven.", []),
        ("calc 2*3", []),
        ('<tool_call>\n{"name": </tool_call>', [ToolCall("", "", "the call is not JSON")]),
        ('<tool_call>\n{"name": "calc"', [ToolCall("", "", "the call has no end")]),
        ("<tool_call>\n{}\n</tool_call>", [ToolCall("", "", "the call has no name")]),
    ],
)
def test_calls_of_qwen3_are_found(qwen3, text, calls):
    assert found(qwen3[1], text) == calls


def test_call_within_thinking_or_in_letters_is_none_for_the_family(qwen3):
    template, rendered = qwen3
    call = [ToolCall("calc", {"text": "2*3"})]
    within = f"<think>\nIs it {CALL}?\n</think>\n\nSeven."
    assert (found(rendered, within), found(template, within)) == ([], call)
    assert found(rendered, f"<think>\nhm\n</think>\n\n{CALL}") == call
    # A call ends thinking that has no other end, as vLLM reads it.
    assert found(rendered, f"<think>\nhm {CALL}") == call
    prompt = rendered.prompt_ids(EXAMPLE)
    letters = rendered.plain_ids(CALL, prompt)
    reads = [
        read_turn(tokenizer, ["calc"], prompt=prompt, ids=letters, text=CALL) for tokenizer in (rendered, template)
    ]
    assert [read.calls for read in reads] == [[], call]


def test_calls_of_llama3_are_json(llama3):
    template, rendered = llama3
    text = '{"name": "calc", "parameters": {"text": "2*3"}}'
    assert found(rendered, text) == [ToolCall("calc", {"text": "2*3"})]
    assert found(template, text) == []


def test_warm_start_has_the_ids_of_an_episode(qwen3):
    _, rendered = qwen3
    turns = (("assistant", CALL), ("tool", "6"), ("assistant", "Six."))
    example = Example("How many?", "", "6", messages=EXAMPLE.messages, demonstration=turns)
    (kept,) = keep_solutions([example], rendered, 200)
    before = replied(rendered, CALL)
    before += rendered.observation_ids([], [{"role": "tool", "content": "6"}], before=before, tools=[TOOL])
    ids = [*rendered.prompt_ids(EXAMPLE), *kept.solution_ids.tolist()]
    assert ids == [*before, *encode_continuation(rendered, before, "Six."), rendered.eos_ids[0]]


@pytest.mark.parametrize(
    ("family", "arguments", "message"),
    [
        ("qwen", {}, r"^environment\.renderer: got 'qwen', expected one of deepseek-r1, .*qwen3, "),
        ("gpt-oss", {}, r"^environment\.renderer: got 'gpt-oss', expected one of "),
        ("default", {}, r"^environment\.renderer: got 'default', expected one of "),
        ("llama-3", {}, r"^environment\.renderer: got 'llama-3', but the tokenizer of model\.path is of another fam"),
        (
            "qwen3",
            {"tone": 1},
            r"^data\.template_arguments: environment\.renderer qwen3 refuses them: .*enable_thinking",
        ),
    ],
)
def test_renderer_that_does_not_fit_is_refused(qwen3, family, arguments, message):
    with pytest.raises(UserError, match=message):
        RenderedTokenizer(qwen3[0], family, arguments)


def test_family_whose_texts_become_tokens_is_refused(qwen3, monkeypatch):
    monkeypatch.setattr(RenderedTokenizer, "_divided", lambda self, text, separator: text)
    with pytest.raises(UserError, match=r"^environment\.renderer: got 'qwen3', which makes control tokens of texts in"):
        RenderedTokenizer(qwen3[0], "qwen3", {})


class LetterEngine(Scripted):
    """Draws the turns of a script letter by letter, in ids that no encoder writes."""

    def __init__(self, script, clock, tokenizer):
        super().__init__(script, clock)
        self.tokenizer = tokenizer
        self.drawn = []

    def step(self):
        texts = {id(turn): self.text_of(turn) for turn in self.waiting}
        ended = super().step()
        for turn in ended:
            ids = []
            for piece in re.findall("<[^<>]*>|.|\\n", texts[id(turn)]):
                ids += encode_continuation(self.tokenizer, [*turn.ids, *ids], piece)
            turn.tokens = [*ids, self.tokenizer.eos_ids[0]]
            turn.finish = "stop"
            turn.rollout_log_probs = [-0.25] * len(turn.tokens)
            turn.versions = [self.version] * len(turn.tokens)
            self.drawn.append((turn.ids, turn.tokens))
        return ended


def test_episode_trains_the_ids_that_were_sampled(qwen3_folder, tmp_path, monkeypatch):
    (tmp_path / "mine.py").write_text(SOURCE)
    config = tiny.config_of(
        f"model={{path: '{qwen3_folder}'}}",
        f"data={{system: '{SYSTEM}', max_prompt_length: 600, max_completion_length: 400}}",
        f"environment={{name: '{tmp_path / 'mine.py'}:Tools', renderer: qwen3, max_turns: 3}}",
        "rollout={prompts_per_step: 1, samples_per_prompt: 2}",
    )
    tokenizer = tell_tools(config, load_tokenizer(config))
    call = CALL.replace("calc", "add").replace("text", "numbers")
    script = [[f"<think>\nhm\n</think>\n\n{call.replace('2*3', '1+2')}", call.replace("add", "mul"), "3"], ["3"]]
    engine = LetterEngine(script, ScriptClock(), tokenizer)
    monkeypatch.setattr(episode_source, "engine_of_run", lambda context: engine)
    task = Task("sums", [Example("1+2", "3", "3")], [], lambda example, text, finished: {"reward": 1.0})
    model = tiny.model_of(tiny.config_of())
    context = tiny.context_of(config, model=model, task=task, tokenizer=tokenizer)
    source = EpisodeSource(context)
    try:
        source.update(None, 3)
        drawn = source.sample(Request.of(context, 0))
    finally:
        source.close()
    turns = engine.drawn[0], *engine.drawn[2:]
    row, sampled = (np.asarray(drawn.tokens[0])[np.asarray(m[0])] for m in (drawn.token_mask, drawn.completion_mask))
    assert row.tolist() == [*turns[-1][0], *turns[-1][1]]
    assert sampled.tolist() == [token for _, ids in turns for token in ids]
    assert tokenizer.encode(tokenizer.decode_all(sampled.tolist())) != sampled.tolist()
    said = [tokenizer.decode_all(after[len(before) + len(ids) :]) for (before, ids), (after, _) in pairwise(turns)]
    assert "<tool_response>\n3\n</tool_response>" in said[0]
    assert "error: " in said[1]
    assert drawn.metrics["episode_tool_calls"] == 1.0
    assert "<tools>" in tokenizer.decode_all(turns[0][0])
