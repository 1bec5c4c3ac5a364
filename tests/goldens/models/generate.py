"""Makes tiny random models of each family with transformers and records what they compute on a CPU in float32.

    python3.11 -m venv ENV
    ENV/bin/pip install torch==2.13.0 transformers==5.23.0 peft==0.21.2 safetensors==0.8.0 tokenizers==0.23.3
    ENV/bin/python tests/goldens/models/generate.py             # writes the folders below, again the same numbers
    ENV/bin/python tests/goldens/models/generate.py --check     # only compares with what is there

To prove the other way, that transformers loads what kljax saves:

    .venv/bin/python -m tests.goldens.models.save OUT           # every folder, loaded and saved again by kljax
    ENV/bin/python tests/goldens/models/generate.py --load OUT  # loads them with transformers, compares the logits

A folder is what `save_pretrained` wrote, with `expected.npz` beside it; `adapter/` is what PEFT wrote. Names in
`expected.npz`: `tokens`, `mask` [B, T] padded on the left; `logits` [B, T, V] and `log_probs` [B, T] (of token t, 0 at
the first real token and at padding); `loss`, the mean negative log-prob, and `grad/<weight>`; `prompts`, `prompt_mask`,
`greedy` [B, 12] and `margin`, the least gap between the best two logits on the way. With the adapter: `adapter/logits`,
`adapter/log_probs` and `adapter/grad/<weight>`, and `adapter/merged`, the logits of the weights that PEFT merged, which
their rounding moves by up to 6e-6.
"""

import argparse
import json
import os
import pathlib
import sys
import tempfile
from collections.abc import Callable
from typing import Any

os.environ["HF_HUB_OFFLINE"] = "1"

import numpy as np
import torch
import transformers
from peft import LoraConfig, PeftModel, get_peft_model
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

HERE = pathlib.Path(__file__).resolve().parent
LENGTHS = (26, 17, 9)  # of the rows, which are padded on the left to the longest
PROMPTS = (7, 10, 4)
NEW_TOKENS = 12
LEAST_MARGIN = 0.005
CHAT = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
COMMON = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 64,
    "vocab_size": 160,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 1e4,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}
YARN_ROPE = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 16}


def qwen2() -> Any:
    """Tied, biases in the query, key and value projections."""
    config = COMMON | {"num_hidden_layers": 3, "tie_word_embeddings": True}
    config.pop("head_dim")
    return transformers.Qwen2ForCausalLM(transformers.Qwen2Config(**config))


def qwen3() -> Any:
    """Norms of queries and keys, an output head of its own, in several files; with a tokenizer and a chat template."""
    config = COMMON | {"num_hidden_layers": 3, "vocab_size": 320, "tie_word_embeddings": False}
    return transformers.Qwen3ForCausalLM(transformers.Qwen3Config(**config))


def llama3() -> Any:
    """The scaled rotary embedding of Llama 3, of an original length shorter than the text."""
    config = COMMON | {"num_hidden_layers": 3, "tie_word_embeddings": False, "rope_parameters": LLAMA3_ROPE}
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**config))


def mistral() -> Any:
    """A window shorter than the text in every layer; stored in bfloat16."""
    config = COMMON | {"num_hidden_layers": 3, "tie_word_embeddings": False, "sliding_window": 6}
    return transformers.MistralForCausalLM(transformers.MistralConfig(**config))


def gemma3() -> Any:
    """Sliding and full layers with a rotary embedding each, 1 + w norms around both blocks, scaled embeddings."""
    config = COMMON | {"num_hidden_layers": 6, "sliding_window": 6, "query_pre_attn_scalar": 24}
    return transformers.Gemma3ForCausalLM(transformers.Gemma3TextConfig(**config))


def gemma2() -> Any:
    """A sliding and a full layer, norms around both blocks, and soft caps that are low enough to matter."""
    config = COMMON | {"num_hidden_layers": 2, "sliding_window": 6, "query_pre_attn_scalar": 24}
    config |= {"attn_logit_softcapping": 1.5, "final_logit_softcapping": 2.0}
    return transformers.Gemma2ForCausalLM(transformers.Gemma2Config(**config))


def qwen3_yarn() -> Any:
    """The rotary embedding of YaRN, of an original length shorter than the text."""
    config = COMMON | {"num_hidden_layers": 2, "tie_word_embeddings": True, "rope_parameters": YARN_ROPE}
    return transformers.Qwen3ForCausalLM(transformers.Qwen3Config(**config))


def qwen3_moe() -> Any:
    """Experts in all layers but the second, which is dense."""
    config = COMMON | {"num_hidden_layers": 3, "num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 20}
    config |= {"norm_topk_prob": True, "mlp_only_layers": [1]}
    return transformers.Qwen3MoeForCausalLM(transformers.Qwen3MoeConfig(**config))


def qwen2_moe() -> Any:
    """A shared expert beside the others in every second layer, and gates that do not add up to 1."""
    config = COMMON | {"num_hidden_layers": 4, "num_experts": 5, "num_experts_per_tok": 3, "moe_intermediate_size": 12}
    config |= {"shared_expert_intermediate_size": 20, "decoder_sparse_step": 2}
    config.pop("head_dim")
    return transformers.Qwen2MoeForCausalLM(transformers.Qwen2MoeConfig(**config))


def mixtral() -> Any:
    """The names of its files are its own; a window in every layer."""
    config = COMMON | {"num_hidden_layers": 2, "num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": 6}
    return transformers.MixtralForCausalLM(transformers.MixtralConfig(**config | {"intermediate_size": 20}))


def olmoe() -> Any:
    """Norms of the queries and keys of all heads together, and clips that are low enough to matter."""
    config = COMMON | {"num_hidden_layers": 2, "num_experts": 7, "num_experts_per_tok": 3, "clip_qkv": 1.0}
    config.pop("head_dim")
    return transformers.OlmoeForCausalLM(transformers.OlmoeConfig(**config | {"intermediate_size": 12}))


def gpt_oss() -> Any:
    """Sinks, sliding and full layers, YaRN without whole numbers, and a limit of the activation that matters."""
    config = COMMON | {"num_hidden_layers": 2, "num_local_experts": 5, "num_experts_per_tok": 2, "sliding_window": 6}
    config |= {"intermediate_size": 20, "swiglu_limit": 1.0, "rope_parameters": YARN_ROPE | {"truncate": False}}
    return transformers.GptOssForCausalLM(transformers.GptOssConfig(**config))


FAMILIES: dict[str, Callable[[], Any]] = {
    "qwen2": qwen2,
    "qwen3": qwen3,
    "llama3": llama3,
    "mistral": mistral,
    "gemma3": gemma3,
    "gemma2": gemma2,
    "qwen3_yarn": qwen3_yarn,
    "qwen3_moe": qwen3_moe,
    "qwen2_moe": qwen2_moe,
    "mixtral": mixtral,
    "olmoe": olmoe,
    "gpt_oss": gpt_oss,
}
STORED = {"mistral": torch.bfloat16}
SHARDS = {"qwen3": "60KB"}
ADAPTERS = {
    "qwen3": LoraConfig(r=4, lora_alpha=8, target_modules=["q_proj", "v_proj", "down_proj"], task_type="CAUSAL_LM"),
    "gemma3": LoraConfig(r=3, lora_alpha=6, target_modules="all-linear", use_rslora=True, task_type="CAUSAL_LM"),
}
# So that the logits move by more than 0.1, and by rounding not more than those of the base.
ADAPTER_STD = {"qwen3": 0.1, "gemma3": 0.02}
# The weights whose gradients are recorded: one of each kind, and of the layers the first and the last.
GRADIENTS = (
    "embed_tokens.weight",
    "lm_head.weight",
    "model.norm.weight",
    "0.self_attn.q_proj.weight",
    "0.self_attn.q_norm.weight",
    "0.self_attn.k_proj.bias",
    "0.input_layernorm.weight",
    "LAST.self_attn.k_proj.weight",
    "LAST.self_attn.o_proj.weight",
    "LAST.mlp.gate_proj.weight",
    "LAST.mlp.down_proj.weight",
    "LAST.post_feedforward_layernorm.weight",
    "LAST.self_attn.k_norm.weight",
    "LAST.mlp.gate.weight",
    "LAST.mlp.experts.gate_up_proj",
    "LAST.mlp.experts.down_proj",
    "LAST.mlp.shared_expert.up_proj.weight",
    "LAST.mlp.shared_expert_gate.weight",
    "0.self_attn.sinks",
    "LAST.self_attn.sinks",
    "LAST.mlp.router.weight",
    "LAST.mlp.router.bias",
    "LAST.mlp.experts.gate_up_proj_bias",
    "LAST.mlp.experts.down_proj_bias",
)


def make_tokenizer() -> Any:
    """A byte-level BPE of 320 tokens with a chat template, as the hub's tokenizers are made."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    text = ["the quick brown fox jumps over the lazy dog; what is 12 + 30 - 7? The answer is #### 35"] * 20
    trainer = trainers.BpeTrainer(
        vocab_size=320,
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        special_tokens=["<|endoftext|>", "<|im_start|>", "<|im_end|>"],
        show_progress=False,
    )
    tokenizer.train_from_iterator(text, trainer)
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token="<|im_end|>", pad_token="<|endoftext|>", chat_template=CHAT
    )


def write(name: str, folder: pathlib.Path) -> None:
    """The folder of a family, without the results: weights that leave no norm at 1 and no bias at 0."""
    torch.manual_seed(sum(map(ord, name)))
    model = FAMILIES[name]().float().eval()
    with torch.no_grad():
        for weight in model.parameters():
            weight.mul_(3 if weight.ndim >= 2 else 1).add_(torch.randn_like(weight) * 0.1)
    model.to(STORED.get(name, torch.float32))
    model.save_pretrained(folder, max_shard_size=SHARDS.get(name, "50GB"))
    if name == "qwen3":
        make_tokenizer().save_pretrained(folder)
    if name in ADAPTERS:
        adapted = get_peft_model(load(folder), ADAPTERS[name])
        with torch.no_grad():
            for key, weight in adapted.named_parameters():
                if "lora_" in key:
                    weight.copy_(torch.randn_like(weight) * ADAPTER_STD[name])
        adapted.peft_config["default"].base_model_name_or_path = f"tiny-random/{name}"
        adapted.save_pretrained(folder / "adapter")
        (folder / "adapter" / "README.md").unlink(missing_ok=True)
        settings = folder / "adapter" / "adapter_config.json"
        recorded = json.loads(settings.read_text())
        # PEFT writes a set.
        settings.write_text(
            json.dumps(recorded | {"target_modules": sorted(recorded["target_modules"])}, indent=2) + "\n"
        )
    for path in folder.rglob("*.safetensors"):
        path.chmod(0o644)


def load(folder: pathlib.Path) -> Any:
    """A folder as transformers loads it, in float32."""
    model, info = transformers.AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, attn_implementation="eager", output_loading_info=True
    )
    wrong = {key: value for key, value in info.items() if value}
    if wrong:
        raise SystemExit(f"{folder}: transformers did not load everything: {wrong}")
    return model.eval()


def left_padded(lengths: tuple[int, ...], vocab_size: int, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Random tokens [B, T] and their mask."""
    rng, width = np.random.default_rng(seed), max(lengths)
    mask = np.arange(width)[None] >= width - np.array(lengths)[:, None]
    tokens = np.where(mask, rng.integers(3, vocab_size, mask.shape), 0)
    return torch.tensor(tokens), torch.tensor(mask)


def positions(mask: torch.Tensor) -> torch.Tensor:
    return (mask.long().cumsum(-1) - 1).clamp(min=0)


def forward(model: Any, tokens: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    return model(tokens, attention_mask=mask.long(), position_ids=positions(mask), use_cache=False).logits


def log_probs(logits: torch.Tensor, tokens: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """Log-prob of every token that a real one precedes, [B, T]; 0 elsewhere."""
    chosen = logits[:, :-1].log_softmax(-1).gather(-1, tokens[:, 1:, None])[..., 0]
    scored = mask[:, 1:] & mask[:, :-1]
    return torch.nn.functional.pad(torch.where(scored, chosen, 0.0), (1, 0))


def statistics(model: Any, wanted: Callable[[str], bool]) -> dict[str, np.ndarray]:
    """Logits, log-probs and gradients on the padded batch."""
    tokens, mask = left_padded(LENGTHS, model.config.vocab_size, 1)
    model.zero_grad()
    for weight in model.parameters():
        weight.requires_grad_(True)
    logits = forward(model, tokens, mask)
    scored = log_probs(logits, tokens, mask)
    loss = -scored.sum() / (mask.sum() - len(mask))
    loss.backward()
    grads = {f"grad/{key}": weight.grad for key, weight in model.named_parameters() if wanted(key)}
    actual = {"logits": torch.where(mask[..., None], logits, 0.0), "log_probs": scored, "loss": loss, **grads}
    return {key: value.detach().numpy() for key, value in actual.items()}


def greedy(model: Any) -> dict[str, np.ndarray]:
    """Continuations of left-padded prompts by the most probable token, each from a whole forward pass.

    The prompts are the first drawn ones where no choice is so close that rounding could turn it.
    """
    for seed in range(2, 50):
        tokens, mask = left_padded(PROMPTS, model.config.vocab_size, seed)
        actual, margin = {"prompts": tokens.numpy(), "prompt_mask": mask.numpy()}, np.inf
        with torch.no_grad():
            for _ in range(NEW_TOKENS):
                best = forward(model, tokens, mask)[:, -1].topk(2)
                margin = min(margin, float((best.values[:, 0] - best.values[:, 1]).min()))
                tokens = torch.cat([tokens, best.indices[:, :1]], -1)
                mask = torch.cat([mask, torch.ones_like(mask[:, :1])], -1)
        if margin > LEAST_MARGIN:
            return actual | {"greedy": tokens[:, -NEW_TOKENS:].numpy(), "margin": np.float32(margin)}
    raise SystemExit("no prompts whose greedy continuations are clear")


def expected(folder: pathlib.Path) -> dict[str, np.ndarray]:
    """Everything that `expected.npz` holds."""
    model = load(folder)
    layers = model.config.num_hidden_layers
    endings = tuple(name.replace("LAST", str(layers - 1)) for name in GRADIENTS)
    tokens, mask = left_padded(LENGTHS, model.config.vocab_size, 1)
    actual = {"tokens": tokens.numpy(), "mask": mask.numpy()}
    actual |= statistics(model, lambda key: key.endswith(endings)) | greedy(model)
    if (folder / "adapter").is_dir():
        adapted = PeftModel.from_pretrained(load(folder), folder / "adapter").eval()
        recorded = tuple(f"{layers - 1}.self_attn.v_proj.lora_{half}.default.weight" for half in "AB")
        with_adapter = statistics(adapted, lambda key: key.endswith(recorded))
        actual |= {f"adapter/{key}": value for key, value in with_adapter.items()}
        with torch.no_grad():
            merged = forward(adapted.merge_and_unload(), tokens, mask)
        actual["adapter/merged"] = torch.where(mask[..., None], merged, 0.0).numpy()
        gap = np.abs(actual["adapter/merged"] - actual["adapter/logits"]).max()
        print(f"{folder.name}: merged logits differ from PEFT's own by {gap:.1e}")
    return {key: np.asarray(value, np.int32 if value.dtype == np.int64 else None) for key, value in actual.items()}


def compare(name: str, got: dict[str, np.ndarray], want: dict[str, np.ndarray]) -> float:
    """The largest difference; ends the program if a name or an integer differs."""
    if got.keys() != want.keys():
        raise SystemExit(f"{name}: the recorded names differ: {sorted(got.keys() ^ want.keys())}")
    worst = 0.0
    for key, value in want.items():
        if value.dtype.kind in "ib" and not np.array_equal(got[key], value):
            raise SystemExit(f"{name}: {key} differs")
        worst = max(worst, float(np.abs(got[key].astype(float) - value.astype(float)).max()))
    return worst


def check_saved(root: pathlib.Path) -> None:
    """Compares the logits of a folder saved by kljax, loaded by transformers, with the recorded logits."""
    for folder in sorted(path for path in root.iterdir() if path.is_dir()):
        name, _, merged = folder.name.partition("-")
        want = dict(np.load(HERE / name / "expected.npz"))
        tokens, mask = torch.tensor(want["tokens"]).long(), torch.tensor(want["mask"])
        logits = forward(load(folder), tokens, mask).detach().numpy()
        recorded = want["adapter/merged" if merged else "logits"]
        worst = np.abs(np.where(want["mask"][..., None], logits, 0) - recorded).max()
        print(f"{folder.name}: largest difference of the logits {worst:.1e}")
        if worst > 5e-6:
            raise SystemExit(f"{folder.name}: {worst:.1e} is above 5e-6")


def main() -> None:
    """Writes, or compares."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="compare instead of writing")
    parser.add_argument("--only", nargs="+", choices=FAMILIES, default=list(FAMILIES), help="some of the families")
    parser.add_argument("--load", type=pathlib.Path, metavar="OUT", help="load what kljax saved")
    options = parser.parse_args()
    torch.set_num_threads(1)
    if options.load:
        check_saved(options.load)
        return
    for name in options.only:
        with tempfile.TemporaryDirectory() as scratch:
            folder = HERE / name if not options.check else pathlib.Path(scratch) / name
            write(name, folder)
            actual = expected(folder)
            if options.check:
                worst = compare(name, actual, dict(np.load(HERE / name / "expected.npz")))
                print(f"{name}: largest difference {worst:.1e}")
            else:
                np.savez_compressed(folder / "expected.npz", **actual)
                size = sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
                print(f"{name}: {size} bytes, margin {actual['margin']:.3f}, std {actual['logits'].std():.2f}")
    versions = {module.__name__: module.__version__ for module in (torch, transformers)}
    print(json.dumps(versions), file=sys.stderr)


if __name__ == "__main__":
    main()
