"""Observations between sampled replies: encoded as text, within what the chat template writes around them."""

import dataclasses

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.train.data.test_tokenizer_folder import FOLDERS
from train.config.errors import UserError
from train.data.prompts import check_solutions, encode_solutions, keep_prompts, keep_solutions
from train.data.tasks import Example
from train.data.tokenizers import ByteTokenizer, encode_continuation
from train.data.tokenizers.files import load_folder
from train.data.tokenizers.folder import CONTENT

KINDS = ("chatml", "gemma", "llama3")
EXAMPLE = Example("How many?", "", "", messages=(("user", "How many?"),))


@pytest.fixture(scope="module", params=KINDS)
def tokenizer(request):
    arguments = {"date_string": "26 Jul 2024"} if request.param == "llama3" else None
    return load_folder(FOLDERS / request.param, arguments=arguments)


def observed(tokenizer, text, reply="Tom has seven.", *, ended=True):
    """The prompt with a sampled reply, and the ids of an observation after it."""
    end = [tokenizer.eos_ids[0]] if ended else []
    prompt = tokenizer.prompt_ids(EXAMPLE)
    ids = [*prompt, *encode_continuation(tokenizer, prompt, reply), *end]
    return ids, tokenizer.observation_ids(tokenizer.messages(EXAMPLE), [{"role": "user", "content": text}], before=ids)


def test_episode_has_the_text_of_the_rendered_conversation(tokenizer):
    messages = (*EXAMPLE.messages, ("assistant", "Tom has seven."), ("user", "and apples"))
    expected = tokenizer.decode_all(tokenizer.prompt_ids(Example("", "", "", messages=messages)))
    template_end = tokenizer._added[tokenizer.eos_ids[0]]
    reply_end = expected.split("Tom has seven.")[1]
    if reply_end.startswith(template_end):
        ids, after = observed(tokenizer, "and apples")
        assert tokenizer.decode_all([*ids, *after]) == expected
    ids, after = observed(tokenizer, "and apples", ended=False)
    assert tokenizer.decode_all([*ids, *after]) == expected


@given(st.data())
def test_observation_never_becomes_a_control_token(tokenizer, data):
    controls = [text for text in tokenizer._added.values() if len(text) > 1]
    text = "".join(data.draw(st.lists(st.sampled_from([*controls, "Tom ", "7", "<", "|>"]), max_size=4)))
    _, plain = observed(tokenizer, "Tom")
    _, after = observed(tokenizer, text)
    count = [sum(token in tokenizer._added for token in ids) for ids in (plain, after)]
    assert count[0] == count[1]
    assert text in tokenizer.decode_all(after)


@given(st.data())
def test_contents_of_a_conversation_never_become_control_tokens(tokenizer, data):
    controls = [text for text in tokenizer._added.values() if len(text) > 1]
    texts = st.lists(st.sampled_from([*controls, "Tom ", "7", "<", "|>"]), max_size=4).map("".join)
    roles = ("user", "assistant", "user")
    said = [data.draw(texts), "Seven.", data.draw(texts)]
    plain, ids = (
        tokenizer.conversation_ids([{"role": r, "content": c} for r, c in zip(roles, contents, strict=True)])
        for contents in (["a", "Seven.", "b"], said)
    )
    count = [sum(token in tokenizer._added for token in tokens) for tokens in (plain, ids)]
    assert count[0] == count[1]


def test_conversation_goes_on_as_its_observations_are_written(tokenizer):
    user = {"role": "user", "content": "How many?"}
    reply = {"role": "assistant", "content": "Tom has seven."}
    more = [{"role": "user", "content": "and apples"}]
    prompt = tokenizer.conversation_ids([user])
    assert prompt == tokenizer.prompt_ids(EXAMPLE)
    ids = [*prompt, *encode_continuation(tokenizer, prompt, reply["content"])]
    ids += tokenizer.observation_ids([user], more, before=ids)
    assert tokenizer.decode_all(ids) == tokenizer.decode_all(tokenizer.conversation_ids([user, reply, *more]))


def test_mark_in_a_message_is_refused(tokenizer):
    with pytest.raises(UserError, match="does not write messages of user as they are"):
        tokenizer.observation_ids(
            [{"role": "user", "content": "a"}],
            [{"role": "user", "content": "b"}, {"role": "assistant", "content": CONTENT.format(0)}],
            before=[1],
        )


def test_bytes_are_appended():
    tokenizer = ByteTokenizer()
    assert tokenizer.observation_ids([], [{"role": "tool", "content": "<eos>"}], before=[1]) == list(b"<eos>\n")


def test_template_that_changes_observations_is_refused(tmp_path):
    for file in (FOLDERS / "chatml").iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    template = "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content | upper }}<|im_end|>\n{% endfor %}"
    (tmp_path / "chat_template.jinja").write_text(template)
    tokenizer = load_folder(tmp_path)
    with pytest.raises(
        UserError, match=r"^environment: the chat template does not write messages of assistant as they are$"
    ):
        observed(tokenizer, "and")


def test_warm_start_leaves_observations_out():
    ids = [ord("a"), 257, ord("b"), ord("c"), 257]
    masked = Example("?", "", "x", solution_ids=ids, solution_mask=[True, True, False, True, True])
    batch = encode_solutions([masked, Example("?", "", "x")], ByteTokenizer(), length=8)
    assert batch.completion_mask.tolist() == [
        [False, False, True, True, False, True, True, False],
        [False, False, True, True, False, False, False, False],
    ]
    wrong = Example("?", "", "x", solution_ids=ids, solution_mask=[True])
    with pytest.raises(
        UserError, match=r"^solution_mask: got 1 entries for the 5 tokens of the solution of '\?', expected"
    ):
        keep_solutions([wrong], ByteTokenizer(), 9)


def test_demonstration_has_the_ids_of_its_episode(tokenizer):
    ids, after = observed(tokenizer, "and <|im_end|> apples", reply="How many?")
    reply = encode_continuation(tokenizer, [*ids, *after], "Seven.")
    turns = (("assistant", "How many?"), ("user", "and <|im_end|> apples"), ("assistant", "Seven."))
    (kept,) = keep_solutions([dataclasses.replace(EXAMPLE, solution="7", demonstration=turns)], tokenizer, 99)
    prompt = tokenizer.prompt_ids(EXAMPLE)
    ending = [tokenizer.eos_ids[0]]
    assert [*prompt, *kept.solution_ids.tolist()] == [*ids, *after, *reply, *ending]
    sampled = len(ids) - len(prompt)
    assert kept.solution_mask.tolist() == [True] * sampled + [False] * len(after) + [True] * (len(reply) + 1)


TOOL = {"type": "function", "function": {"name": "calc", "parameters": {"type": "object", "properties": {}}}}
TELLING = "{% if tools %}<|im_start|>system\n{{ tools[0].function.name }}<|im_end|>\n{% endif %}"
REST = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


@pytest.mark.parametrize(("template", "tells"), [(TELLING + REST, True), (REST, False)])
def test_prompts_and_demonstrations_tell_the_tools_that_a_template_writes(tmp_path, template, tells):
    for file in (FOLDERS / "chatml").iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    (tmp_path / "chat_template.jinja").write_text(template)
    plain = load_folder(tmp_path)
    tokenizer = plain.with_tools([TOOL])
    turns = (("assistant", "How many?"), ("tool", "7"), ("assistant", "Seven."))
    example = dataclasses.replace(EXAMPLE, solution="7", demonstration=turns)
    told, untold = (keep_solutions(keep_prompts([example], x, 99), x, 99)[0] for x in (tokenizer, plain))
    prompt = told.prompt_ids.tolist()
    messages = tokenizer.messages(example)
    assert prompt == tokenizer.conversation_ids(messages, [TOOL])
    assert ("calc" in tokenizer.decode_all(prompt)) == tells
    assert (prompt == untold.prompt_ids.tolist()) == (not tells), "a template that tells no tools has the same prompts"
    assert told.solution_ids.tolist() == untold.solution_ids.tolist()
    reply, observation, _ = ({"role": role, "content": text} for role, text in turns)
    ids = [*prompt, *encode_continuation(tokenizer, prompt, reply["content"]), tokenizer.eos_ids[0]]
    ids += tokenizer.observation_ids(messages, [observation], before=ids, tools=[TOOL])
    assert [*prompt, *told.solution_ids.tolist()][: len(ids)] == ids
    assert tokenizer.solution_ids(dataclasses.replace(EXAMPLE, solution="Seven.")) == plain.solution_ids(
        dataclasses.replace(EXAMPLE, solution="Seven.")
    )


@pytest.mark.parametrize("roles", [("tool", "assistant"), ("assistant", "tool"), ("assistant", "assistant"), ("user",)])
def test_demonstration_has_turns_with_an_observation_between(roles):
    example = Example("?", "2", "2", demonstration=tuple((role, "text") for role in roles))
    with pytest.raises(
        UserError, match=rf"^demonstration: got the roles {', '.join(roles)} after '\?', expected turns"
    ):
        keep_solutions([example], ByteTokenizer(), 13)


def test_demonstration_counts_its_observations_in_its_length():
    turns = (("assistant", "calc 1+1"), ("tool", "2"), ("assistant", "2"))
    example = Example("?", "2", "2", demonstration=turns)
    (kept,) = keep_solutions([example], ByteTokenizer(), 13)
    assert bytes(i for i in kept.solution_ids.tolist() if i < 256) == b"calc 1+12\n2"
    for check in (keep_solutions, check_solutions):
        with pytest.raises(UserError, match=r"^data\.max_completion_length: got 12, .* the shortest has 13 tokens"):
            check([example], ByteTokenizer(), 12)
