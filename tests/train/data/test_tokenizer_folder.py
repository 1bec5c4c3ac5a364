"""tokenizer.json and chat templates, held to what transformers made of the same files (tests/goldens/tokenizers)."""

import functools
import json
import os
import re
import shutil
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from train.config.errors import UserError
from train.config.load import parse
from train.data.prompts import keep_prompts
from train.data.tasks.task import Example
from train.data.tokenizers import UNKNOWN, ByteTokenizer, load_tokenizer, vocabulary_bytes
from train.data.tokenizers.chat import ChatTemplate
from train.data.tokenizers.files import load_folder
from train.rollouts.sampler import stop_table
from train.run.recorder import token_texts

FOLDERS = Path(__file__).parents[2] / "goldens/tokenizers"
KINDS = ("chatml", "llama3", "gemma")


def expected(kind):
    return json.loads((FOLDERS / kind / "expected.json").read_text("utf-8"))


def example(messages, prompt="p", solution="s"):
    return Example(prompt, "", solution, tuple((message["role"], message["content"]) for message in messages))


def changed(tmp_path, kind, **files):
    """A copy of a folder with other contents in some files; None removes one."""
    folder = tmp_path / kind
    shutil.copytree(FOLDERS / kind, folder)
    for name, change in files.items():
        path = folder / name.replace("__", ".")
        if change is None:
            path.unlink()
        elif isinstance(change, str):
            path.write_text(change, "utf-8")
        else:
            old = json.loads(path.read_text("utf-8")) if path.exists() else {}
            path.write_text(json.dumps(old | change), "utf-8")
    return folder


def load(kind):
    """Loads a folder; the template of Llama 3 needs a date, to write the same text on every day."""
    return load_folder(FOLDERS / kind, arguments={"date_string": "26 Jul 2024"} if kind == "llama3" else None)


@pytest.mark.parametrize("kind", KINDS)
def test_conversations_are_encoded_like_transformers(kind):
    known = expected(kind)
    assert len(known["chats"]) >= 6
    for case in known["chats"]:
        tokenizer = load_folder(FOLDERS / kind, arguments=case["arguments"])
        chat = example(known["conversations"][case["conversation"]])
        if "error" in case:
            with pytest.raises(UserError, match=f"refuses messages of system, user: {case['error']}"):
                tokenizer.prompt_ids(chat)
        elif case["reply"]:
            assert tokenizer.prompt_ids(chat) == case["ids"], case
        else:
            assert tokenizer.encode(case["text"]) == case["ids"], case
            source = (FOLDERS / kind / "chat_template.jinja").read_text("utf-8")
            config = json.loads((FOLDERS / kind / "tokenizer_config.json").read_text("utf-8"))
            template = ChatTemplate(source, config | case["arguments"])
            assert template.render(known["conversations"][case["conversation"]], reply=False) == case["text"]


@pytest.mark.parametrize("kind", KINDS)
def test_texts_are_encoded_like_transformers(kind):
    tokenizer, known = load_folder(FOLDERS / kind, chat=False), expected(kind)
    assert tokenizer.vocab_size == known["vocab_size"]
    for case in known["texts"]:
        assert tokenizer.encode(case["text"]) == case["ids"]
        assert tokenizer.decode(case["ids"]) == case["decoded"]
        assert tokenizer.prompt_ids(Example(case["text"], "", "")) == case["framed"]


@pytest.mark.parametrize("kind", KINDS)
def test_decode_all_of_prompt_gives_rendered_template(kind):
    tokenizer = load(kind)
    for case in (case for case in expected(kind)["chats"] if "ids" in case):
        assert tokenizer.decode_all(case["ids"]) == case["text"]


@pytest.mark.parametrize("kind", KINDS)
def test_bytes_of_tokens_join_to_the_text(kind):
    tokenizer = load(kind)
    pieces = tokenizer.token_bytes()
    assert len(pieces) == tokenizer.vocab_size
    for case in expected(kind)["texts"]:
        joined = b"".join(pieces[token] for token in case["ids"]).decode("utf-8")
        # Decoders of sentencepiece take the space away that every text begins with.
        assert (joined.removeprefix(" ") if kind == "gemma" else joined) == case["decoded"]
    assert all(pieces[token] == b"" for token in tokenizer.eos_ids)
    named = expected("chatml") and load_folder(FOLDERS / "chatml")
    assert named.token_bytes()[named.encode("<think>")[0]] == b"<think>"


def test_first_and_last_tokens_of_a_text():
    chatml, llama, gemma = (load(kind) for kind in KINDS)
    names = [[t.decode_all([i]) for i in t.eos_ids] for t in (chatml, llama, gemma)]
    assert names == [
        ["<|im_end|>", "<|endoftext|>"],
        ["<|eot_id|>", "<|end_of_text|>", "<|eom_id|>"],
        ["<eos>", "<end_of_turn>"],
    ]
    assert chatml.bos_id is None
    assert (llama.bos_id, gemma.bos_id) == (llama.encode("<|begin_of_text|>")[0], 2)
    assert (gemma.pad_id, llama.pad_id) == (0, llama.eos_ids[0])
    for tokenizer in (llama, gemma):
        assert tokenizer.prompt_ids(example([{"role": "user", "content": "hi"}])).count(tokenizer.bos_id) == 1


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("chat", [True, False])
def test_solutions_go_on_where_prompts_end(kind, chat):
    tokenizer = load(kind) if chat else load_folder(FOLDERS / kind, chat=False)
    single = Example("Tom has", "7", " 7 apples." if not chat else " 7 apples.\n")
    head, tail = tokenizer.prompt_ids(single), tokenizer.solution_ids(single)
    assert tail[-1] in tokenizer.eos_ids
    assert not set(tail[:-1]) & set(tokenizer.eos_ids)
    if chat:  # as the template writes the whole conversation
        text = tokenizer._template.render(
            [{"role": "user", "content": "Tom has"}, {"role": "assistant", "content": "7 apples."}], reply=False
        )
        assert tokenizer.encode(text)[: len(head) + len(tail)] == head + tail
    else:
        full = [*tokenizer.prompt_ids(Example("Tom has 7 apples.", "", "")), tokenizer.eos_ids[0]]
        assert tokenizer.decode(head + tail) == tokenizer.decode(full)
        assert head + tail == full or kind == "gemma"  # whose merges go over the border


def test_solution_ends_at_its_first_eos(tmp_path):
    """A template may write more after a reply: the policy would not be asked for it."""
    template = "{% for message in messages %}{{ message.content }}<|im_end|>and more<|im_end|>{% endfor %}"
    tokenizer = load_folder(changed(tmp_path, "chatml", chat_template__jinja=template))
    assert tokenizer.solution_ids(Example("Tom has", "7", "7")) == [*tokenizer.encode("7"), tokenizer.eos_ids[0]]


def test_system_prompt_comes_first_unless_the_conversation_differs():
    tokenizer = load_folder(FOLDERS / "chatml", system="Be brief.")
    user = {"role": "user", "content": "hi"}
    assert "system\nBe brief.<" in tokenizer._render(tokenizer._template, example([user]), answer=None)
    with_system = tokenizer._render(
        tokenizer._template, example([{"role": "system", "content": "Own."}, user]), answer=None
    )
    assert "Own." in with_system
    assert "Be brief." not in with_system


def test_sampled_tokens_stay_visible_in_the_text():
    tokenizer = load_folder(FOLDERS / "chatml")
    seven, start = tokenizer.encode("7")[0], tokenizer.encode("<|im_start|>")[0]
    beyond = tokenizer.vocab_size + 3  # rows of the embedding beyond the tokenizer
    assert tokenizer.decode([seven, tokenizer.eos_ids[0]]) == "7"
    assert tokenizer.decode([seven, start, beyond, seven]) == f"7<|im_start|>{UNKNOWN}7"
    assert tokenizer.decode(tokenizer.encode("\ud800!")) == "?!"


def test_bos_follows_the_tokenizer_config_if_set(tmp_path):
    plain = Example("a", "", "")
    without = load_folder(
        changed(tmp_path / "1", "llama3", tokenizer_config__json={"add_bos_token": False}), chat=False
    )
    assert without.prompt_ids(plain) == without.encode("a")
    told = {"add_bos_token": True, "bos_token": {"content": "<|im_start|>", "special": True}}
    arguments = load_folder(changed(tmp_path / "2", "chatml", tokenizer_config__json=told), chat=False)
    assert arguments.prompt_ids(plain) == [arguments.bos_id, *arguments.encode("a")]
    assert arguments.prompt_ids(Example("<|im_start|>a", "", "")) == [arguments.bos_id, *arguments.encode("a")]


def test_padding_and_truncation_of_files_are_disabled(tmp_path):
    cut = {"truncation": {"direction": "Right", "max_length": 2, "strategy": "LongestFirst", "stride": 0}}
    pad = {"strategy": {"Fixed": 9}, "direction": "Right", "pad_to_multiple_of": None, "pad_id": 0, "pad_type_id": 0}
    folder = changed(tmp_path, "chatml", tokenizer__json=cut | {"padding": pad | {"pad_token": "!"}})
    assert load_folder(folder).encode("1234") == load_folder(FOLDERS / "chatml").encode("1234")


def test_where_a_template_is_found(tmp_path):
    user = example([{"role": "user", "content": "hi"}])
    listed = {"chat_template": [{"name": "tool_use", "template": "x"}, {"name": "default", "template": "a"}]}
    folder = changed(tmp_path, "chatml", chat_template__jinja=None, tokenizer_config__json=listed)
    assert load_folder(folder).prompt_ids(user) == load_folder(folder).encode("a")
    (folder / "chat_template.json").write_text(json.dumps({"chat_template": "b"}), "utf-8")
    assert load_folder(folder).prompt_ids(user) == load_folder(folder).encode("b")
    (folder / "chat_template.jinja").write_text("c", "utf-8")
    assert load_folder(folder).prompt_ids(user) == load_folder(folder).encode("c")
    (tmp_path / "own.jinja").write_text("{{ messages[0].content }}{{ n }}", "utf-8")
    with_template = load_folder(folder, template=str(tmp_path / "own.jinja"), arguments={"n": 7})
    assert with_template.prompt_ids(user) == with_template.encode("hi7")


NO_DEFAULT = r"chat_template: got the templates {}, expected one called default; set data\.chat_template=FILE"


@pytest.mark.parametrize(
    ("templates", "message"),
    [
        ([{"name": "tool_use", "template": "x"}, {"name": "rag", "template": "y"}], NO_DEFAULT.format("tool_use, rag")),
        ({"tool_use": "x"}, NO_DEFAULT.format("tool_use")),
        ([], NO_DEFAULT.format(r"\[\]")),
        ([{"name": "default"}], "chat_template: got dict, expected text or named texts"),
        ({"default": None}, "chat_template: got dict, expected text or named texts"),
    ],
)
def test_templates_without_a_default_are_refused(tmp_path, templates, message):
    folder = changed(tmp_path, "chatml", chat_template__jinja=None, tokenizer_config__json={"chat_template": templates})
    with pytest.raises(UserError, match=message):
        load_folder(folder)
    assert load_folder(folder, chat=False).prompt_ids(Example("a", "", ""))
    (tmp_path / "own.jinja").write_text("a")
    assert load_folder(folder, template=str(tmp_path / "own.jinja")).prompt_ids(Example("a", "", ""))


def test_named_templates_in_files_need_a_default(tmp_path):
    folder = changed(tmp_path, "chatml", chat_template__jinja=None)
    (folder / "additional_chat_templates").mkdir()
    (folder / "additional_chat_templates/tool_use.jinja").write_text("x")
    with pytest.raises(UserError, match=NO_DEFAULT.format("tool_use")):
        load_folder(folder)
    (folder / "chat_template.jinja").write_text("a")
    assert load_folder(folder).prompt_ids(Example("b", "", "")) == load_folder(folder).encode("a")


@pytest.mark.parametrize(
    ("files", "settings", "message"),
    [
        ({"tokenizer__json": None}, {}, r"has no tokenizer\.json; convert the tokenizer with"),
        ({"tokenizer__json": "{}"}, {}, r"cannot read .*tokenizer\.json"),
        ({"tokenizer_config__json": "{"}, {}, r"cannot read .*tokenizer_config\.json"),
        ({"tokenizer_config__json": "[1]"}, {}, r"tokenizer_config\.json holds list"),
        ({"chat_template__jinja": None}, {"chat": True}, r"data\.chat: got true, but .* has no chat template"),
        ({"chat_template__jinja": None}, {"system": "x"}, r"data\.system: only a chat template reads it, and .* none"),
        ({}, {"chat": False, "arguments": {"a": 1}}, r"data\.template_arguments: .* data\.chat is false"),
        ({}, {"template": "missing.jinja"}, r"data\.chat_template: cannot read missing\.jinja"),
        (
            {"chat_template__jinja": "{% if %}"},
            {},
            r"data\.chat: .*chatml: the chat template is not valid jinja2: line 1",
        ),
        ({"config__json": {"vocab_size": 10}}, {}, r"has 355 ids, but config\.json a vocabulary of 10"),
        (
            {"tokenizer_config__json": {"eos_token": None}, "generation_config__json": None},
            {},
            "has no EOS token; set eos_token in",
        ),
    ],
)
def test_unusable_folders_are_named(tmp_path, files, settings, message):
    with pytest.raises(UserError, match=message):
        load_folder(changed(tmp_path, "chatml", **files), **settings)


def test_template_cannot_act_on_this_machine():
    for source in (
        "{{ ''.__class__.__mro__ }}",
        "{{ messages.append(1) }}",
        "{{ (0).__class__.__base__.__subclasses__() }}",
    ):
        text = ""
        try:
            text = ChatTemplate(source, {}).render([{"role": "user", "content": ""}], reply=True)
        except ValueError:
            continue
        assert "class" not in text


def test_unknown_decoder_is_named_when_bytes_are_requested(tmp_path):
    folder = changed(
        tmp_path, "chatml", tokenizer__json={"decoder": {"type": "WordPiece", "prefix": "", "cleanup": True}}
    )
    with pytest.raises(UserError, match="got WordPiece, expected ByteLevel"):
        load_folder(folder).token_bytes()


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("{{ strftime_now('%d %b %Y') }}", "writes the date or the time, .* data.template_arguments={date_string: 26"),
        ("{% set d = strftime_now('%H:%M') %}{{ messages[0].content }}{{ d }}", "writes the date or the time"),
        ("{{ range(10 ** 9 // 10 ** 5) | random }}", "writes another text each time"),
    ],
)
def test_template_with_another_text_each_day_is_refused(tmp_path, source, message):
    folder = changed(tmp_path, "chatml", chat_template__jinja=source)
    with pytest.raises(UserError, match=rf"data\.chat: .*chatml: the chat template {message}"):
        load_folder(folder)
    with pytest.raises(UserError, match="writes the date or the time"):
        load_folder(FOLDERS / "llama3")


@pytest.mark.parametrize(
    "source",
    [
        "{% if strftime_now is defined %}{{ messages[0].content }}{% endif %}",
        "{{ raise_exception('needs a system message') }}{{ strftime_now('%Y') }}",
    ],
)
def test_template_with_an_equal_text_is_loaded(tmp_path, source):
    assert load_folder(changed(tmp_path, "chatml", chat_template__jinja=source))


def test_template_file_may_begin_with_a_mark(tmp_path):
    folder = changed(tmp_path, "chatml", chat_template__jinja="\ufeffa\r\nb")
    assert load_folder(folder).prompt_ids(Example("", "", "")) == load_folder(folder).encode("a\nb")


def test_dropout_of_merges_is_switched_off(tmp_path, capsys):
    state = json.loads((FOLDERS / "chatml/tokenizer.json").read_text("utf-8"))["model"]
    folder = changed(tmp_path, "chatml", tokenizer__json={"model": state | {"dropout": 0.5}})
    tokenizer = load_folder(folder)
    assert "the dropout of 0.5 is switched off" in capsys.readouterr().err
    text = "Tom has 7 apples, and the quick brown fox jumps."
    assert {tuple(tokenizer.encode(text)) for _ in range(20)} == {tuple(load("chatml").encode(text))}


def replace(pattern, content):
    return {"type": "Replace", "pattern": pattern, "content": content}


@pytest.mark.parametrize("part", ["normalizer", "decoder"])
@pytest.mark.parametrize(
    "steps",
    [
        [replace({"String": "a"}, "aa")] * 40,
        [replace({"Regex": "a|b"}, "a" * 50)] * 2,
        [replace({"String": " "}, " " * 2000)],
    ],
)
def test_text_grown_beyond_memory_is_refused(tmp_path, part, steps):
    name = f"{part}s"
    folder = changed(tmp_path, "chatml", tokenizer__json={part: {"type": "Sequence", name: steps}})
    with pytest.raises(UserError, match=rf"tokenizer\.json: {part}: makes a text up to .* times as long, expected at"):
        load_folder(folder)


def test_usual_normalizers_are_loaded(tmp_path):
    steps = [{"type": "NFKC"}, replace({"Regex": " {2,}"}, "\u2581"), replace({"String": " "}, "\u2581")]
    folder = changed(tmp_path, "gemma", tokenizer__json={"normalizer": {"type": "Sequence", "normalizers": steps}})
    assert load_folder(folder).encode("a  b")


def without(kind, *pieces, **model):
    """The tokenizer of a golden without some pieces of its vocabulary, and the merges that make them."""
    state = json.loads((FOLDERS / kind / "tokenizer.json").read_text("utf-8"))["model"]
    vocab = {piece: number for piece, number in state["vocab"].items() if not set(pieces) & {piece, *piece}}
    merges = [pair for pair in state["merges"] if {*pair, "".join(pair)} <= vocab.keys()]
    numbers = {piece: number for number, piece in enumerate(vocab)}
    return {"tokenizer__json": {"model": state | {"vocab": numbers, "merges": merges} | model, "added_tokens": []}}


def test_text_without_tokens_is_named(tmp_path):
    ends = {"tokenizer_config__json": {"eos_token": "!"}, "generation_config__json": None}
    tokenizer = load_folder(changed(tmp_path, "chatml", **without("chatml", "+", "Ã"), **ends), chat=False)
    assert tokenizer.prompt_ids(Example("8 2=", "", ""))
    for text, letters in (("8+2=", r"'\+'"), ("naïve", "'ï'"), ("+é+", r"'\+', 'é'")):
        message = rf"model\.path: the tokenizer cannot spell {letters} of the text '{re.escape(text)}', and would leave"
        with pytest.raises(UserError, match=message):
            tokenizer.prompt_ids(Example(text, "", ""))
        with pytest.raises(UserError, match=message):
            tokenizer.solution_ids(Example("8", "", text))
        with pytest.raises(UserError, match=message):
            keep_prompts([Example("8", "", ""), Example(text, "", "")], tokenizer, 99)


def test_text_of_the_unknown_token_is_a_warning(tmp_path, capsys):
    pieces = [f"<0x{byte:02X}>" for byte in range(256)]
    changes = without("gemma", *pieces, byte_fallback=False)
    tokenizer = load_folder(changed(tmp_path, "gemma", **changes), chat=False)
    assert tokenizer.decode(tokenizer.encode("Tom")) == "Tom"
    assert capsys.readouterr().err == ""
    for text in ("Tom 数", "学"):
        assert "<unk>" in tokenizer.decode_all(tokenizer.encode(text))
    assert capsys.readouterr().err == (
        "warning: model.path: the tokenizer has no token for '数' of the text 'Tom 数'; the model reads <unk>\n"
    )


@pytest.mark.parametrize("kind", KINDS)
@given(text=st.text())
def test_complete_vocabulary_spells_every_text(kind, text):
    tokenizer = load_once(kind)
    assert tokenizer.encode(text) == tokenizer._encode(text.encode("utf-8", "replace").decode())


load_once = functools.cache(load)


def test_tokenizer_config_wins_over_the_map_of_special_tokens(tmp_path):
    known = load_folder(changed(tmp_path / "known", "chatml", generation_config__json=None)).eos_ids
    other = {"eos_token": "<think>"}
    folder = changed(tmp_path / "both", "chatml", generation_config__json=None, special_tokens_map__json=other)
    assert load_folder(folder).eos_ids == known
    config = json.loads((folder / "tokenizer_config.json").read_text("utf-8"))
    del config["eos_token"]
    (folder / "tokenizer_config.json").write_text(json.dumps(config), "utf-8")
    alone = load_folder(folder)
    assert alone.eos_ids[0] == alone.encode("<think>")[0] != known[0]


def test_missing_ends_of_a_vocabulary_are_named(tmp_path):
    for number, (config, name) in enumerate(
        [
            ({"generation_config__json": {"eos_token_id": 99999}}, "generation_config"),
            ({"generation_config__json": {"eos_token_id": [351, 355]}}, "generation_config"),
            ({"generation_config__json": {"eos_token_id": "2"}}, "generation_config"),
            ({"generation_config__json": None, "config__json": {"eos_token_id": 400, "vocab_size": 355}}, "config"),
        ]
    ):
        with pytest.raises(UserError, match=rf"{name}\.json: eos_token_id: got .*, expected ids below 355, the vocab"):
            load_folder(changed(tmp_path / str(number), "chatml", **config))
    # Models often have more rows than their tokenizer has tokens.
    more = {"generation_config__json": {"eos_token_id": 400}, "config__json": {"vocab_size": 512}}
    tokenizer = load_folder(changed(tmp_path / "more", "chatml", **more))
    assert (tokenizer.eos_ids[-1], tokenizer.vocab_size, tokenizer.token_bytes()[400]) == (400, 401, b"")
    assert token_texts(tokenizer).of(np.array([400, 399])) == [UNKNOWN, UNKNOWN]


@pytest.mark.parametrize(
    "name",
    [
        *("config.json", "generation_config.json", "tokenizer_config.json", "special_tokens_map.json"),
        *("chat_template.jinja", "chat_template.json", "tokenizer.json"),
    ],
)
def test_pipe_in_place_of_a_file_is_named(tmp_path, name):
    folder = changed(tmp_path, "chatml", chat_template__jinja=None)
    (folder / name).unlink(missing_ok=True)
    os.mkfifo(folder / name)
    with pytest.raises(UserError, match=rf"{re.escape(name)}.*it is no regular file|has no tokenizer\.json"):
        load_folder(folder)


def test_a_prompt_without_a_token_is_named():
    with pytest.raises(UserError, match="prompt: got '', which has no tokens"):
        keep_prompts([Example("", "", "")], load_folder(FOLDERS / "chatml", chat=False), 8)


def test_rows_beyond_the_tokenizer_disturb_no_search():
    tokenizer = load_folder(FOLDERS / "chatml")
    size = tokenizer.vocab_size + 5
    table = stop_table(["</think>"], vocabulary_bytes(tokenizer, size))
    assert table.next.shape[1] == size
    # The last token of this tokenizer is the stop; a row beyond it must not be read as it.
    assert (table.next[0, tokenizer.encode("</think>")[0]], table.next[0, size - 1]) == (len(table.next) - 1, 0)


def test_byte_tokenizer_bytes_join_to_its_text():
    tokenizer = ByteTokenizer()
    ids = [*tokenizer.encode("né"), tokenizer.bos_id, tokenizer.eos_id]
    pieces = tokenizer.token_bytes()
    assert len(pieces) == tokenizer.vocab_size
    assert b"".join(pieces[token] for token in ids).decode() == tokenizer.decode(ids)
    assert tokenizer.eos_ids == (tokenizer.eos_id,)


def test_config_without_folder_uses_bytes():
    config, warnings = parse({"steps": 1, "data": {"system": "Be brief."}})
    assert isinstance(load_tokenizer(config), ByteTokenizer)
    assert any(line.startswith("data.system: not read") for line in warnings)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        (
            {"data": {"chat": False, "system": "x"}},
            r"data\.system: only a chat template reads it, and data\.chat is false",
        ),
        ({"data": {"chat_template": "no.jinja"}}, r"data\.chat_template: got 'no\.jinja', expected a jinja file"),
        ({"data": {"judge": "strict"}}, r"data\.judge: task arithmetic does not read it, only gsm8k"),
        (
            {"task": "math", "data": {"train": "datasets:", "eval": "datasets:a/b"}},
            r"data\.train: got 'datasets:', expected",
        ),
        (
            {"task": "countdown", "data": {"train": "a.jsonl"}},
            r"data\.train: got 'a\.jsonl', but task countdown makes its own",
        ),
    ],
)
def test_unread_fields_are_errors(fields, message):
    with pytest.raises(UserError, match=message):
        parse({"steps": 1, **fields})
