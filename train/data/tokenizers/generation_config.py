"""Penalties of `generation_config.json`, which change the distribution of a sampler, and which no run uses."""

from pathlib import Path

from train.config.errors import warn
from train.data.tokenizers.files import read_json

FACTORS = ("repetition_penalty", "encoder_repetition_penalty", "typical_p", "guidance_scale")
"""Fields of transformers and vLLM that a config does not have, without an effect at 1."""
CHANGES = (
    *("presence_penalty", "frequency_penalty", "no_repeat_ngram_size", "encoder_no_repeat_ngram_size"),
    *("min_length", "min_new_tokens", "exponential_decay_length_penalty", "epsilon_cutoff", "eta_cutoff", "top_h"),
    *("bad_words_ids", "suppress_tokens", "begin_suppress_tokens", "sequence_bias", "watermarking_config"),
)
"""The same, without an effect at 0, empty or null."""


def warn_of_generation_config(folder: str | Path) -> None:
    """Warns if the folder names penalties or the like.

    Raises:
      UserError: the file is damaged.
    """
    content = read_json(Path(folder) / "generation_config.json")
    changed = [name for name in FACTORS if content.get(name) not in (None, 1)]
    changed += [name for name in CHANGES if content.get(name)]
    if changed:
        named = ", ".join(f"{name} {content[name]}" for name in changed)
        warn(
            f"model.path: generation_config.json of {folder} has {named}, which this run does not use: it trains and "
            "samples the policy itself, and asks servers for the same; who serves an export gets it again"
        )
