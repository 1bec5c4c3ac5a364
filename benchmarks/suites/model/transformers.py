"""transformers: `generate` of a Qwen 3 in PyTorch, with its KV cache. Its environment has no JAX."""

import pathlib
from typing import Any

import numpy as np
import torch
import transformers

from benchmarks.suites.model import problem
from benchmarks.suites.model.problem import ModelContender


class TransformersContender(ModelContender):
    """A model in evaluation mode."""

    def __init__(self, work: dict[str, Any], directory: str) -> None:
        super().__init__(work, directory)
        no_ids = dict.fromkeys(("eos_token_id", "bos_token_id", "pad_token_id"))
        config = transformers.Qwen3Config(**problem.hf_config(self.work), **no_ids)
        self.model = transformers.Qwen3ForCausalLM(config).eval()
        weights = {
            name: torch.from_numpy(array) for name, array in problem.load_weights(pathlib.Path(directory)).items()
        }
        missing, unexpected = self.model.load_state_dict(weights, strict=False)
        if unexpected or set(missing) - {"lm_head.weight"}:
            raise ValueError(f"weights: missing {missing}, unexpected {unexpected}")
        self.model.tie_weights()

    def log_probs(self) -> np.ndarray:
        tokens, first = torch.from_numpy(problem.make_sequences(self.work)).long(), self.work.prompt_length
        with torch.inference_mode():
            found = torch.log_softmax(self.model(tokens).logits[:, first - 1 : -1], -1)
        return found.gather(-1, tokens[:, first:, None])[..., 0].numpy()

    def rollout(self) -> np.ndarray:
        # `generate` returns no log-probs.
        prompts = torch.from_numpy(problem.make_prompts(self.work)).long().repeat_interleave(self.work.samples, 0)
        with torch.inference_mode():
            found = self.model.generate(
                prompts,
                attention_mask=torch.ones_like(prompts),
                do_sample=True,
                temperature=1.0,
                top_k=0,
                top_p=1.0,
                max_new_tokens=self.work.completion_length,
                use_cache=True,
            )
        return found[:, self.work.prompt_length :].numpy()

    def versions(self) -> dict[str, str]:
        return {"transformers": transformers.__version__, "torch": torch.__version__}


def load(work: dict[str, Any], directory: str, threads: int) -> TransformersContender:
    """Loads the weights of a directory."""
    if threads:
        torch.set_num_threads(threads)
    return TransformersContender(work, directory)
