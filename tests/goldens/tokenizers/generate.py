"""Makes the small tokenizers beside this file, and records what transformers makes of them.

    python3.11 -m venv ENV && ENV/bin/pip install transformers==5.23.0 tokenizers==0.23.3 jinja2==3.1.6
    ENV/bin/python tests/goldens/tokenizers/generate.py

Three kinds, as the families have them: byte-level BPE with ChatML and no BOS (Qwen), byte-level BPE whose
post-processor puts BOS first (Llama 3), and BPE over sentencepiece-like pieces with byte fallback (Gemma, Llama 2).
The templates are written for these tests and use what those of the families use. `expected.json` of each holds texts
and ids of `apply_chat_template`, and ids and texts of encoding and decoding.
"""

import json
from pathlib import Path

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast

HERE = Path(__file__).parent
CORPUS = [
    "Question: Tom has 3 apples and buys 4 more. How many apples does he have?",
    "Answer: Tom has 3 + 4 = 7 apples.\n#### 7",
    "Reason step by step, and put the final answer within \\boxed{}.",
    "The quick brown fox jumps over the lazy dog. It's 12:30, isn't it?",
    "user assistant system model You are a helpful assistant.",
] * 4
TEXTS = ["", "a", "Tom has 7 apples.", " #### 42\n", "naïve café — 数学 🙂", "  two  spaces ", "tab\there\n\n"]
USER = {"role": "user", "content": 'How many? <b>&"quoted" 数学</b>'}
CONVERSATIONS = {
    "user": [USER],
    "system": [{"role": "system", "content": " Be brief. "}, USER],
    "dialogue": [USER, {"role": "assistant", "content": "7"}, {"role": "user", "content": "Sure?"}],
}

CHATML = """\
{%- set ns = namespace(seen=false) %}
{%- if messages[0].role != 'system' %}
{{- '<|im_start|>system\\nYou are a helpful assistant.<|im_end|>\\n' }}
{%- endif %}
{%- for message in messages %}
    {%- if message.role == 'user' %}{% set ns.seen = true %}{% endif %}
    {%- if message.role == 'assistant' %}
        {{- '<|im_start|>assistant\\n' }}
        {%- generation %}{{ message.content + '<|im_end|>' }}{% endgeneration %}{{ '\\n' }}
    {%- else %}
        {{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>' + '\\n' }}
    {%- endif %}
{%- endfor %}
{%- if not ns.seen %}{{ raise_exception('No user query found in messages.') }}{% endif %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
    {%- if enable_thinking is defined and enable_thinking is false %}
        {{- '<think>\\n\\n</think>\\n\\n' }}
    {%- endif %}
{%- endif %}
"""
LLAMA3 = """\
{{- bos_token }}
{%- if not date_string is defined %}
    {%- set date_string = strftime_now("%d %b %Y") if strftime_now is defined else "26 Jul 2024" %}
{%- endif %}
{%- if messages[0]['role'] == 'system' %}
    {%- set system_message = messages[0]['content'] | trim %}
    {%- set messages = messages[1:] %}
{%- else %}
    {%- set system_message = "" %}
{%- endif %}
{{- "<|start_header_id|>system<|end_header_id|>\\n\\n" }}
{{- "Today Date: " + date_string + "\\n\\n" }}
{{- system_message }}
{{- "<|eot_id|>" }}
{%- for message in messages %}
    {%- if loop.index0 > 8 %}{% break %}{% endif %}
    {{- '<|start_header_id|>' + message['role'] + '<|end_header_id|>\\n\\n' }}
    {{- message['content'] | trim + '<|eot_id|>' }}
{%- endfor %}
{{- '{"last": ' + (messages[-1] | tojson(indent=1)) + '}' if show_last is defined }}
{%- if add_generation_prompt %}
    {{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}
{%- endif %}
"""
GEMMA = """\
{{ bos_token }}
{%- if messages[0]['role'] == 'system' -%}
    {{ raise_exception('System role not supported') }}
{%- endif -%}
{% for message in messages %}
    {% if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}
        {{- raise_exception('Conversation roles must alternate user/assistant/user/assistant/...') }}
    {% endif %}
    {% set role = 'model' if message['role'] == 'assistant' else message['role'] %}
    {{- '<start_of_turn>' + role + '\\n' + message['content'] | trim + '<end_of_turn>\\n' }}
{% endfor %}
{% if add_generation_prompt %}
    {{- '<start_of_turn>model\\n' }}
{%- endif %}
"""


def byte_level(special: list[str], plain: list[str]) -> Tokenizer:
    """Byte-level BPE of 350 tokens, then the added ones."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.normalizer = normalizers.NFC()
    digits = Regex(r"(?i:'s|'t)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+")
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Split(digits, "isolated"), pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=350, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    tokenizer.add_special_tokens([AddedToken(text, special=True, normalized=False) for text in special])
    tokenizer.add_tokens([AddedToken(text, special=False, normalized=False) for text in plain])
    return tokenizer


def pieces(special: list[str]) -> Tokenizer:
    """BPE over text whose spaces are U+2581, with a token for every byte."""
    spaced = [text.replace(" ", "\u2581") for text in CORPUS]
    seed = Tokenizer(models.BPE())
    trainer = trainers.BpeTrainer(vocab_size=120, show_progress=False, special_tokens=special)
    seed.train_from_iterator(spaced, trainer)
    state = json.loads(seed.to_str())["model"]
    vocab = {text: number for number, text in enumerate(special)}
    for text in [f"<0x{byte:02X}>" for byte in range(256)] + [
        token for token in state["vocab"] if token not in special
    ]:
        vocab[text] = len(vocab)
    merges = [tuple(merge) for merge in state["merges"]]
    tokenizer = Tokenizer(models.BPE(vocab, merges, unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("\u2581"), normalizers.Replace(" ", "\u2581")])
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    tokenizer.add_special_tokens([AddedToken(text, special=True, normalized=False) for text in special])
    return tokenizer


def _lines(value: object) -> str:
    """JSON with a line for each entry of a list."""
    texts = [json.dumps(item, ensure_ascii=False) for item in (value if isinstance(value, list) else [value])]
    return "[\n" + ",\n".join(texts) + "\n]" if isinstance(value, list) else texts[0]


def write(
    name: str, tokenizer: Tokenizer, template: str, arguments: list[dict], stops: list[str] | int | None, **special
) -> None:
    """The folder of one tokenizer, and what transformers makes of it."""
    folder = HERE / name
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, **special)
    fast.chat_template = template
    fast.save_pretrained(folder)
    if stops is not None:
        ids = [fast.convert_tokens_to_ids(stop) for stop in stops]
        (folder / "generation_config.json").write_text(
            json.dumps({"eos_token_id": ids if len(ids) > 1 else ids[0]}) + "\n"
        )
    fast = PreTrainedTokenizerFast.from_pretrained(folder)
    chats = []
    for key, messages in CONVERSATIONS.items():
        for inputs in arguments:
            for reply in (True, False):
                case = {"conversation": key, "arguments": inputs, "reply": reply}
                try:
                    case["text"] = fast.apply_chat_template(
                        messages, tokenize=False, add_generation_prompt=reply, **inputs
                    )
                    case["ids"] = fast.apply_chat_template(
                        messages, add_generation_prompt=reply, return_dict=False, **inputs
                    )
                except Exception as error:
                    case["error"] = str(error)
                chats.append(case)
    plain = [
        {"text": text, "framed": fast.encode(text), "ids": fast.encode(text, add_special_tokens=False)}
        for text in TEXTS
    ]
    for case in plain:
        case["decoded"] = fast.decode(case["ids"], skip_special_tokens=False)
    expected = {"conversations": CONVERSATIONS, "chats": chats, "texts": plain, "vocab_size": len(fast)}
    lines = [f'"{key}": {_lines(value)}' for key, value in expected.items()]
    (folder / "expected.json").write_text("{\n" + ",\n".join(lines) + "\n}\n", encoding="utf-8")


def main() -> None:
    """All three."""
    chatml = byte_level(["<|endoftext|>", "<|im_start|>", "<|im_end|>"], ["<think>", "</think>"])
    write(
        "chatml", chatml, CHATML, [{}, {"enable_thinking": False}], ["<|im_end|>", "<|endoftext|>"],
        eos_token="<|im_end|>", pad_token="<|endoftext|>", add_bos_token=False,
    )  # fmt: skip
    names = [
        "<|begin_of_text|>",
        "<|end_of_text|>",
        "<|start_header_id|>",
        "<|end_header_id|>",
        "<|eom_id|>",
        "<|eot_id|>",
    ]
    llama = byte_level(names, [])
    llama.post_processor = processors.Sequence(
        [
            processors.ByteLevel(trim_offsets=False),
            processors.TemplateProcessing(
                single="<|begin_of_text|> $A",
                pair="<|begin_of_text|> $A <|begin_of_text|> $B",
                special_tokens=[("<|begin_of_text|>", llama.token_to_id("<|begin_of_text|>"))],
            ),
        ]
    )
    write(
        "llama3", llama, LLAMA3, [{"date_string": "1 Jan 2025"}, {"date_string": "", "show_last": True}],
        ["<|end_of_text|>", "<|eom_id|>", "<|eot_id|>"], bos_token="<|begin_of_text|>", eos_token="<|eot_id|>",
    )  # fmt: skip
    gemma = pieces(["<pad>", "<eos>", "<bos>", "<unk>", "<start_of_turn>", "<end_of_turn>"])
    gemma.post_processor = processors.TemplateProcessing(
        single="<bos> $A", pair="<bos> $A <bos> $B", special_tokens=[("<bos>", gemma.token_to_id("<bos>"))]
    )
    write(
        "gemma", gemma, GEMMA, [{}], ["<eos>", "<end_of_turn>"],
        bos_token="<bos>", eos_token="<eos>", pad_token="<pad>", unk_token="<unk>",
    )  # fmt: skip


if __name__ == "__main__":
    main()
