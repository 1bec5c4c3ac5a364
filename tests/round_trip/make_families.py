"""Writes a tiny random folder of every family, with a tokenizer: `python make_families.py OUT [NAMES]`.

The models are those of `tests/goldens/models/generate.py` with more tokens, and GPT-OSS once more with the experts in
mxfp4, as the hub has them. The folder of NAME is `OUT/NAME/model`. `OUT/NAME/adapter` is a random adapter of PEFT on
attention, router and experts, where a model has them. `OUT/mxfp4.npz` has every byte with every scale, and their
`values` in transformers.
"""

import json
import pathlib
import sys

import numpy as np
import torch
import transformers
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file, save_file
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

sys.path.insert(0, str(pathlib.Path(__file__).parents[1] / "goldens" / "models"))
import generate

MXFP4 = "gpt_oss_mxfp4"
VOCABULARY = 320
"""Tokens of the tokenizer."""


def gpt_oss_mxfp4() -> torch.nn.Module:
    """GPT-OSS with sizes that blocks of 32 divide."""
    config = generate.gpt_oss().config
    config.intermediate_size = 32
    return transformers.GptOssForCausalLM(config)


def pack(folder: pathlib.Path) -> None:
    """Replaces the experts of a folder by random blocks and scales, about as large as they were."""
    file, config = folder / "model.safetensors", folder / "config.json"
    arrays = load_file(file)
    for name in list(arrays):
        if name.endswith(("experts.gate_up_proj", "experts.down_proj")):
            experts, inputs, outputs = arrays.pop(name).shape
            shape = (experts, outputs, inputs // 32)
            arrays[f"{name}_blocks"] = torch.randint(0, 256, (*shape, 16), dtype=torch.uint8)
            arrays[f"{name}_scales"] = torch.randint(122, 126, shape, dtype=torch.uint8)
    save_file(arrays, file, metadata={"format": "pt"})
    stored = {"quant_method": "mxfp4", "modules_to_not_convert": ["model.layers.*.self_attn", "lm_head"]}
    config.write_text(json.dumps(json.loads(config.read_text()) | {"quantization_config": stored}))


def dequantise(out: pathlib.Path) -> None:
    """Writes what transformers makes of each byte with each scale."""
    numbers = torch.arange(256, dtype=torch.uint8)
    blocks = numbers.reshape(1, 1, 16, 16).expand(1, 256, 16, 16)
    scales = numbers.reshape(1, 256, 1).expand(1, 256, 16)
    values = convert_moe_packed_tensors(blocks, scales, dtype=torch.float32)
    np.savez(out / "mxfp4.npz", blocks=blocks, scales=scales, values=values.transpose(1, 2))


def write_adapter(folder: pathlib.Path) -> None:
    """Writes an adapter of the model beside it, if the model has experts."""
    model = generate.load(folder)
    ends = (".experts.gate_up_proj", ".experts.down_proj", ".mlp.gate.weight", ".mlp.router.weight")
    parameters = {name.partition(".mlp.")[2] for name, _ in model.named_parameters() if name.endswith(ends)}
    if not parameters:
        return
    config = LoraConfig(r=3, lora_alpha=6, target_modules=["q_proj", "o_proj"], task_type="CAUSAL_LM")
    config.target_parameters = sorted(f"mlp.{name}" for name in parameters)
    adapted = get_peft_model(model, config)
    with torch.no_grad():
        for name, weight in adapted.named_parameters():
            if "lora_" in name:
                weight.copy_(torch.randn_like(weight) * 0.1)
    adapted.save_pretrained(folder.with_name("adapter"))


if __name__ == "__main__":
    torch.set_num_threads(1)
    dequantise(pathlib.Path(sys.argv[1]))
    generate.COMMON["vocab_size"] = VOCABULARY
    generate.ADAPTERS.clear()
    generate.FAMILIES[MXFP4] = gpt_oss_mxfp4
    for family in sys.argv[2:] or generate.FAMILIES:
        folder = pathlib.Path(sys.argv[1]) / family / "model"
        generate.write(family, folder)
        generate.make_tokenizer().save_pretrained(folder)
        if family == MXFP4:
            pack(folder)
        else:
            write_adapter(folder)
