"""transformers: `generate` of a Qwen 3 in PyTorch, with its cache of keys and values. Its environment has no JAX."""

import pathlib

import numpy as np
import torch
import transformers

from benchmarks._speed import work as works
from benchmarks._speed.work import Work


class Side:
    """A model in evaluation mode.

    Args:
      work: what is done; directory: of the weights.
    """

    def __init__(self, work: Work, directory: pathlib.Path) -> None:
        self.work = work
        config = transformers.Qwen3Config(
            vocab_size=work.vocab,
            hidden_size=work.width,
            intermediate_size=work.mlp_width,
            num_hidden_layers=work.layers,
            num_attention_heads=work.heads,
            num_key_value_heads=work.kv_heads,
            head_dim=work.head_dim,
            rms_norm_eps=works.NORM_EPS,
            rope_parameters={"rope_type": "default", "rope_theta": works.ROPE_THETA},
            tie_word_embeddings=True,
            max_position_embeddings=work.length,
            eos_token_id=None,
            bos_token_id=None,
            pad_token_id=None,
        )
        self.model = transformers.Qwen3ForCausalLM(config).eval()
        weights = {name: torch.from_numpy(array) for name, array in works.load(directory).items()}
        missing, unexpected = self.model.load_state_dict(weights, strict=False)
        if unexpected or set(missing) - {"lm_head.weight"}:
            raise ValueError(f"weights: missing {missing}, unexpected {unexpected}")
        self.model.tie_weights()

    def score(self) -> np.ndarray:
        """`[rows, completion]` log-probs of the sequences that all contenders score."""
        tokens, first = torch.from_numpy(works.make_sequences(self.work)).long(), self.work.prompt_length
        with torch.inference_mode():
            found = torch.log_softmax(self.model(tokens).logits[:, first - 1 : -1], -1)
        return found.gather(-1, tokens[:, first:, None])[..., 0].numpy()

    def rollout(self) -> np.ndarray:
        """`[rows, completion]` tokens of a rollout; without log-probs, which `generate` does not give."""
        prompts = torch.from_numpy(works.make_prompts(self.work)).long().repeat_interleave(self.work.samples, 0)
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
        """Of the libraries."""
        return {"transformers": transformers.__version__, "torch": torch.__version__}
