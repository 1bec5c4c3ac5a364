"""Where completions come from."""

from typing import Annotated, Literal

from pydantic import BeforeValidator, Field

from train.config.types import Count, CountOrZero, Fraction, Positive, Section, Text, tag_defaults_to

Url = Annotated[str, Field(pattern=r"^https?://[^/\s]+"), "text that starts with http:// or https://"]
TopP = Annotated[float, Field(gt=0, le=1)]
Stops = Annotated[tuple[Text, ...], Field(strict=False), "a list of texts"]


class JaxSource(Section):
    type: Literal["jax"]
    """`jax`: sampled in this process; `openai`: by an OpenAI-compatible server such as vLLM; `file`: recorded ones."""


class OpenAISource(Section):
    type: Literal["openai"]
    url: Url
    """openai: the address of the server, without /v1."""
    model: Text
    """openai: the name of the base model there."""
    sync: Literal["lora", "weights", "none"] | None = None
    """openai: what the server is given before each step; null: `lora` where an adapter is trained, else `weights`."""
    folder: Text | None = None
    """openai: where weights are written for the server, which must see the same path; null: a temporary one."""
    api_key_env: Text | None = None
    """openai: the environment variable that holds the key of the server; null: none is sent."""
    timeout: Positive = 600.0
    """openai: seconds that one request may take."""
    retries: CountOrZero = 6
    """openai: further attempts after a request that failed, each after a longer wait."""
    concurrency: Count = 64
    """openai: requests under way at once, one for each prompt."""


class FileSource(Section):
    type: Literal["file"]
    path: Text
    """file: JSON lines or Parquet with a completion a row, or a directory of such files, as `rollout.record` writes."""
    shuffle: bool = True
    """file: another order of the prompts in every epoch, or always that of the file."""


CompletionSource = Annotated[
    JaxSource | OpenAISource | FileSource, Field(discriminator="type"), BeforeValidator(tag_defaults_to("type", "jax"))
]


class Rollout(Section):
    prompts_per_step: Count = 16
    """Prompts of one rollout batch."""
    samples_per_prompt: Count = 8
    """Completions of each prompt: the group of the group estimators."""
    source: CompletionSource = JaxSource(type="jax")
    """Where completions come from."""
    top_k: CountOrZero = 0
    """Draw from the k most probable tokens alone; 0: from all. Log-probs stay those of all tokens."""
    top_p: TopP = 1.0
    """Draw from the most probable tokens that together have this probability; 1: from all."""
    min_p: Fraction = 0.0
    """Draw from tokens at least this share as probable as the most probable one; 0: from all."""
    stop: Stops = ()
    """Texts that end a completion, to which they then belong."""
    slots: Count | None = None
    """jax: rows that are decoded at once, refilled as they end; null: all of them."""
    record_log_probs: bool = True
    """Keep the sampler's log-probs (rollout_log_probs)."""
    policy_lag: CountOrZero = 0
    """Sample with the policy of this many steps ago; the state holds as many copies of the trained weights."""
    record: Text | None = None
    """Write every rollout batch to this directory, a file a step, which `source.type=file` reads."""
