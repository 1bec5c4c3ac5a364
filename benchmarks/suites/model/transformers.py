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

    def __init__(self, work: dict[str, Any], directory: str, threads: int) -> None:
        super().__init__(work, directory)
        if threads:
            torch.set_num_threads(threads)
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
        tokens = torch.from_numpy(problem.make_sequences(self.work)).long()
        first = self.work.prompt_length
        with torch.inference_mode():
            log_probs = torch.log_softmax(self.model(tokens).logits[:, first - 1 : -1], -1)
        return log_probs.gather(-1, tokens[:, first:, None])[..., 0].numpy()

    def rollout(self) -> np.ndarray:
        # `generate` returns no log-probs.
        prompts = torch.from_numpy(problem.make_prompts(self.work)).long().repeat_interleave(self.work.samples, 0)
        sampling = {"do_sample": True, "temperature": 1.0, "top_k": 0, "top_p": 1.0, "use_cache": True}
        lengths = {"attention_mask": torch.ones_like(prompts), "max_new_tokens": self.work.completion_length}
        with torch.inference_mode():
            return self.model.generate(prompts, **sampling, **lengths)[:, self.work.prompt_length :].numpy()

    def versions(self) -> dict[str, str]:
        return {"transformers": transformers.__version__, "torch": torch.__version__}


load = TransformersContender
