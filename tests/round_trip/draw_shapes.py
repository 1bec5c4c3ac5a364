"""Draws mixtures of experts with transformers, and what it computes of them.

    python draw_shapes.py OUT FIRST COUNT FAMILIES

Each folder of OUT has `expected.npz` beside the model, with the names of `tests/goldens/models/generate.py`, and the
gradients of all weights. Sizes divide nothing. A model is drawn again if a router, or a greedy choice, is so close that
rounding could turn it.
"""

import pathlib
import sys
from typing import Any

import numpy as np
import torch
import transformers

sys.path.insert(0, str(pathlib.Path(__file__).parents[1] / "goldens" / "models"))
import generate

LEAST_GAP = 2e-5
"""Least difference of the probabilities of the last chosen and the first refused expert."""
CLASSES = {
    "qwen3_moe": (transformers.Qwen3MoeForCausalLM, transformers.Qwen3MoeConfig),
    "qwen2_moe": (transformers.Qwen2MoeForCausalLM, transformers.Qwen2MoeConfig),
    "mixtral": (transformers.MixtralForCausalLM, transformers.MixtralConfig),
    "olmoe": (transformers.OlmoeForCausalLM, transformers.OlmoeConfig),
    "gpt_oss": (transformers.GptOssForCausalLM, transformers.GptOssConfig),
}


def draw_config(family: str, rng: np.random.Generator) -> dict[str, Any]:
    """Draws the keys of a `config.json`."""

    def size(low: int, high: int) -> int:
        return int(rng.integers(low, high + 1))

    def either(*values: Any) -> Any:
        return values[size(0, len(values) - 1)]

    kv_heads, count, layers = size(1, 2), size(2, 9), size(1, 4)
    heads, head_dim = kv_heads * size(1, 3), 2 * size(2, 7)
    config = {
        "vocab_size": size(90, 200),
        "hidden_size": heads * head_dim,
        "intermediate_size": size(5, 40),
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "num_experts_per_tok": size(1, min(count, 4)),
        "num_local_experts" if family in ("mixtral", "gpt_oss") else "num_experts": count,
        "rms_norm_eps": either(1e-6, 1e-5),
        "tie_word_embeddings": either(True, False),
        "rope_parameters": {"rope_type": "default", "rope_theta": either(1e4, 1e6)},
        "max_position_embeddings": 64,
        "pad_token_id": 0,
        "bos_token_id": 1,
        "eos_token_id": 2,
    }
    if family in ("qwen3_moe", "mixtral", "gpt_oss"):
        config |= {"hidden_size": size(11, 50), "head_dim": head_dim}
    if family in ("qwen3_moe", "qwen2_moe"):
        dense = [number for number in range(layers) if rng.random() < 0.3]
        config |= {"moe_intermediate_size": size(3, 30), "mlp_only_layers": dense[: layers - 1]}
    if family not in ("mixtral", "gpt_oss"):
        config["norm_topk_prob"] = either(True, False)
    if family in ("qwen3_moe", "gpt_oss"):
        config["attention_bias"] = either(True, False)
    if family == "qwen2_moe":
        config |= {"shared_expert_intermediate_size": size(3, 30), "qkv_bias": either(True, False)}
    if family == "mixtral":
        config["sliding_window"] = either(None, size(2, 20))
    if family == "olmoe":
        config["clip_qkv"] = either(None, 1.0)
    if family == "gpt_oss":
        kinds = ("sliding_attention", "full_attention")
        config |= {"sliding_window": size(2, 20), "layer_types": [either(*kinds) for _ in range(layers)]}
        config |= {"swiglu_limit": either(0.5, 1.0, 7.0), "swiglu_alpha": either(1.0, 1.702)}
        rope = generate.YARN_ROPE | {"truncate": either(True, False), "factor": either(2.0, 4.0)}
        config["rope_parameters"] = either(config["rope_parameters"], rope)
    return config


class Gaps:
    """Watches the routers of a model.

    Attributes:
      least: the least difference of the probabilities of the last chosen and the first refused expert.
    """

    def __init__(self, model: Any) -> None:
        self.least, self._active = np.inf, model.config.num_experts_per_tok
        for name, module in model.named_modules():
            if name.endswith(("mlp.gate", "mlp.router")):
                module.register_forward_pre_hook(self._watch)

    def _watch(self, router: Any, inputs: tuple[torch.Tensor, ...]) -> None:
        hidden = inputs[0].detach().reshape(-1, inputs[0].shape[-1])
        logits = hidden @ router.weight.detach().T + getattr(router, "bias", torch.zeros(())).detach()
        ordered = logits.softmax(-1).sort(-1, descending=True).values
        if ordered.shape[-1] > self._active:
            self.least = min(self.least, float((ordered[:, self._active - 1] - ordered[:, self._active]).min()))


def write_shape(number: int, family: str, folder: pathlib.Path) -> None:
    """Writes a model and its numbers."""
    for attempt in range(20):
        rng = np.random.default_rng((number, attempt))
        torch.manual_seed(int(rng.integers(2**31)))
        make, configure = CLASSES[family]
        model = make(configure(**draw_config(family, rng))).float().eval()
        with torch.no_grad():
            for weight in model.parameters():
                weight.mul_(3 if weight.ndim >= 2 else 1).add_(torch.randn_like(weight) * 0.1)
        model.save_pretrained(folder)
        model = generate.load(folder)
        # The grouped product of torch wants rows of 16 bytes.
        model.set_experts_implementation("eager")
        gaps = Gaps(model)
        tokens, mask = generate.left_padded(generate.LENGTHS, model.config.vocab_size, 1)
        actual = {"tokens": tokens.numpy(), "mask": mask.numpy()}
        try:
            actual |= generate.statistics(model, lambda key: True) | generate.greedy(model)
        except SystemExit:
            continue
        if gaps.least > LEAST_GAP:
            values = {
                key: np.asarray(value, np.int32 if value.dtype == np.int64 else None) for key, value in actual.items()
            }
            np.savez(folder / "expected.npz", **values)
            return
    raise SystemExit(f"{folder}: no draw of 20 is clear")


if __name__ == "__main__":
    torch.set_num_threads(1)
    out, first, count, families = pathlib.Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]), sys.argv[4:]
    for number in range(first, first + count):
        write_shape(number, families[number % len(families)], out / f"shape-{number}")
