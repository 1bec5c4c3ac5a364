"""The model of the preset recordings: a Qwen 2 of two layers, as transformers makes it, in float64 throughout."""

import contextlib
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from unittest import mock

import safetensors.torch
import torch
import transformers

from tests.goldens.presets import batch, record
from tests.goldens.systems import release


def config() -> transformers.Qwen2Config:
    """The shape."""
    return transformers.Qwen2Config(
        vocab_size=batch.VOCABULARY,
        hidden_size=16,
        intermediate_size=16,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=32,
        tie_word_embeddings=True,
        pad_token_id=batch.PAD,
        eos_token_id=batch.EOS,
        bos_token_id=None,
        initializer_range=0.4,
        attn_implementation="eager",
    )


def save() -> None:
    """Draws the weights, biases and norms included, and writes the folder."""
    torch.manual_seed(0)
    drawn = transformers.Qwen2ForCausalLM(config())
    with torch.no_grad():
        for name, weight in drawn.named_parameters():
            if weight.ndim == 1:
                weight.add_(0.1 * torch.randn_like(weight), alpha=1.0 if "norm" in name else 2.0)
    drawn.save_pretrained(batch.MODEL)
    (batch.MODEL / "generation_config.json").unlink()


def load() -> transformers.Qwen2ForCausalLM:
    """Loads the model in the default dtype; inside `release.widened()` no part of it works in float32."""
    weights = _weights()
    # `torch.float` is what transformers computes the frequencies of the rotary embedding in.
    with mock.patch.object(torch, "float", torch.get_default_dtype()):
        model = transformers.Qwen2ForCausalLM(config()).to(torch.get_default_dtype())
    missing, unexpected = model.load_state_dict(
        {name: tensor.to(torch.get_default_dtype()) for name, tensor in weights.items()}, strict=False
    )
    assert (missing, unexpected) == (["lm_head.weight"], [])
    model.tie_weights()
    return model


_STORED: dict[str, torch.Tensor] = {}


def _weights() -> dict[str, torch.Tensor]:
    """The stored tensors; `preload` reads them, before anything is widened."""
    return _STORED or preload()


def preload() -> dict[str, torch.Tensor]:
    """Reads the stored tensors, float32, which a patched `torch.float32` would misread."""
    _STORED.update(safetensors.torch.load_file(batch.MODEL / "model.safetensors"))
    return _STORED


def float64_steps(run: record.Run, algorithms: Iterable[str]) -> Iterator[record.Step]:
    """The steps of a recorder in float64."""
    preload()
    with release.widened():
        yield from record.each_step(run, algorithms)


def completion_log_probs(model: torch.nn.Module, recorded: batch.Recorded, rows: slice = slice(None)) -> torch.Tensor:
    """The log-probs [B, T] of the completions at the recorded temperature."""
    tokens = torch.from_numpy(recorded.tokens[rows])
    mask = torch.from_numpy(recorded.token_mask[rows]).long()
    logits = model(input_ids=tokens, attention_mask=mask, position_ids=positions(mask)).logits / batch.TEMPERATURE
    log_probs = torch.log_softmax(logits[:, :-1], -1)
    return log_probs.gather(-1, tokens[:, 1:, None])[..., 0][:, -batch.COMPLETION_LENGTH :]


def packed_logits(trained: torch.nn.Module, tokens: torch.Tensor, lengths: Sequence[int]) -> torch.Tensor:
    """The logits [1, S, V] of sequences packed into one row [1, S], each of which sees itself alone."""
    sequence = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths))
    seen = (sequence[:, None] == sequence) & torch.ones(len(sequence), len(sequence)).tril().bool()
    bias = torch.where(seen, 0.0, torch.finfo(torch.get_default_dtype()).min)
    counted = torch.cat([torch.arange(length) for length in lengths])[None]
    return trained(input_ids=tokens, position_ids=counted, attention_mask=bias[None, None]).logits


@contextlib.contextmanager
def one_process() -> Iterator[None]:
    """A process group of this process alone."""
    with tempfile.TemporaryDirectory() as directory:
        torch.distributed.init_process_group("gloo", init_method=f"file://{directory}/store", rank=0, world_size=1)
        yield
        torch.distributed.destroy_process_group()


def positions(mask: torch.Tensor) -> torch.Tensor:
    """Position ids that count the attended tokens."""
    return (mask.cumsum(-1) - 1).clamp(min=0)
