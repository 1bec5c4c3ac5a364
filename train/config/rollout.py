"""The source of completions and its sampling options."""

from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import Field

from train.config.algorithms import UserFunction, choice_of
from train.config.mesh import Mesh, Parts, fill_axes
from train.config.model import DType
from train.config.types import (
    RECORDING,
    Arguments,
    AxisSize,
    Count,
    CountOrZero,
    Fraction,
    FunctionName,
    Lag,
    PathText,
    Positive,
    Probability,
    Section,
    Size,
    StoredPath,
    SyncName,
    Table,
    Text,
)

Url = Annotated[str, Field(pattern="^https?://"), "text that starts with http:// or https://"]
Urls = Annotated[tuple[Url, ...], Field(strict=False), "a list of addresses"]
Stops = Annotated[tuple[Text, ...], Field(strict=False), "a list of texts"]


class JaxSourceSection(Section):
    type: Literal["jax"]
    """`jax`: this process; `openai`: vLLM or SGLang; `endpoint`: agents; `file`: recorded; `module:function`: yours."""


class OpenAISourceSection(Section):
    type: Literal["openai"]
    url: Url | None = None
    """openai: the address of the server, without /v1; for several, `urls`."""
    urls: Urls = ()
    """openai: addresses of several servers with the same model, in place of `url`; weights go to each of them."""
    router: Url | None = None
    """openai: address of a router in front of `urls`, which gets the requests; null: the least busy server does."""
    on_engine_failure: Literal["stop", "drop"] = "stop"
    """openai: with `urls`, `stop` ends the run if a server fails or has old weights; `drop` goes on without it."""
    in_flight: Literal["finish", "keep"] = "finish"
    """openai: what requests under way do at an update: `finish` before it, or `keep` going with the new weights."""
    model: Text
    """openai: the server's name of the base model."""
    sync: SyncName | None = None
    """openai: what is sent before each step, or who sends it; null: `lora` if an adapter is trained, else `weights`."""
    folder: PathText | None = None
    """openai: directory for weights, at the same path on the server; null: a temporary one."""
    api_key_env: Text | None = None
    """openai: environment variable with the server's API key; null: none is sent."""
    api_key_file: PathText | None = None
    """openai: file with the server's API key, in place of `api_key_env`."""
    timeout: Positive = 600.0
    """openai: time limit of one request, in seconds, from connecting to the last byte of the answer."""
    max_response_bytes: Count | None = None
    """openai: largest answer, also after decompression; null: 16 MiB and 1 KiB for each token of it."""
    retries: CountOrZero = 6
    """openai: retries of a failed request, each after a longer wait."""
    concurrency: Size = 512
    """openai: requests at one time, one for each completion."""

    def chosen_sync(self, *, adapter: bool) -> str:
        """Returns what is sent, or who sends it, for a run that trains an adapter or the weights."""
        return self.sync or ("lora" if adapter else "weights")


class FileSourceSection(Section):
    type: Literal["file"]
    path: StoredPath
    """file: JSON lines or Parquet, of sequences or completions, or a directory of files, as `rollout.record` writes."""
    shuffle: bool = True
    """file: shuffle the prompts anew in every epoch; false: keep the order of the file."""
    max_reference_mib: CountOrZero = 1024
    """file: host memory in MiB for log-probs of a constant reference, which then scores each row once; 0: none."""


class EndpointSourceSection(Section):
    """Episodes of an agent program, which asks this process for completions as it would ask OpenAI."""

    type: Literal["endpoint"]
    agent: FunctionName | None = None
    """endpoint: your agent program, `module:function` or `path/to/file.py:function`; null: programs from outside."""
    arguments: Arguments = Table()
    """endpoint: its keyword arguments."""
    processes: Size = 1
    """endpoint: processes that run the agent program."""
    concurrency: Size = 64
    """endpoint: episodes that one process runs at a time."""
    host: Text = "127.0.0.1"
    """endpoint: address to listen on; one that other machines reach needs a key."""
    port: Annotated[int, Field(ge=0, le=65535)] = 0
    """endpoint: port to listen on; 0: a free one, if `agent` is set."""
    api_key_env: Text | None = None
    """endpoint: environment variable with the key of completions; null: this machine needs none."""
    api_key_file: PathText | None = None
    """endpoint: file with this key, in place of `api_key_env`."""
    reward_key_env: Text | None = None
    """endpoint: environment variable with the key of episodes and rewards, another one, for programs from outside."""
    reward_key_file: PathText | None = None
    """endpoint: file with this key, in place of `reward_key_env`."""
    episode_seconds: Positive = 600.0
    """endpoint: longest time of an episode; an episode beyond it has failed, and is not trained on."""
    renderer: Text | None = None
    """endpoint: a family of the package renderers, such as qwen3, for chats and calls; null: the chat template."""
    max_requests: Size = 1024
    """endpoint: requests at one time; more are answered with 429."""
    rows: Size | None = None
    """endpoint: episodes whose KV cache stays between turns; null: all of a step."""
    max_failures: Fraction = 0.1
    """endpoint: share of the episodes of a step that may fail before the run stops; it stops if all do."""


class UserSourceSection(UserFunction):
    type: Literal["custom"]


SOURCES = (JaxSourceSection, OpenAISourceSection, FileSourceSection, EndpointSourceSection, UserSourceSection)
CompletionSource = Annotated[
    JaxSourceSection | OpenAISourceSection | FileSourceSection | EndpointSourceSection | UserSourceSection,
    Field(discriminator="type"),
    choice_of(SOURCES, default="jax"),
]


class SamplingMesh(Section):
    data: AxisSize
    """Devices that split the rows and replicate the weights; -1, for data or tensor: all that the other leaves."""
    tensor: AxisSize
    """Devices that split the weights, the KV cache by heads, and the vocabulary."""

    def filled(self, mesh: Mesh) -> "SamplingMesh":
        """Returns the sizes without -1, over the devices of `mesh`; raises ValueError if they do not divide these."""
        sizes = {"data": self.data, "expert": mesh.expert, "tensor": self.tensor}
        filled = fill_axes(sizes, mesh.parts().count, "rollout.mesh")
        return self.model_copy(update={"data": filled["data"], "tensor": filled["tensor"]})

    def smallest(self) -> "SamplingMesh":
        """Returns the mesh with 1 in place of -1."""
        return self.model_copy(update={"data": max(self.data, 1), "tensor": max(self.tensor, 1)})

    def parts(self, mesh: Mesh) -> Parts:
        """Returns the parts of rows; axis expert is that of the update's mesh, as experts stay on their devices."""
        fields = ("rollout.mesh.data", *(("mesh.expert",) if mesh.expert > 1 else ()))
        return Parts(self.data * mesh.expert, fields)


def recording_defaults(raw: Mapping[str, Any]) -> dict[str, Any]:
    """Fills in a raw config that reads recorded completions: no task, warm start or evaluation, unless it has them."""
    rollout = raw.get("rollout")
    source = rollout.get("source") if isinstance(rollout, dict) else None
    from_file = isinstance(source, dict) and source.get("type") == "file"
    if raw.get("task", RECORDING if from_file else None) != RECORDING:
        return dict(raw)
    off = {"warm_start": {"steps": 0}, "eval": {"prompts": 0}}
    sections = {name: raw.get(name, {}) for name in off}
    filled = {name: {**off[name], **section} for name, section in sections.items() if isinstance(section, dict)}
    return {"task": RECORDING, **raw, **filled}


class RolloutSection(Section):
    prompts_per_step: Size = 16
    """Prompts in a rollout batch."""
    samples_per_prompt: Size = 8
    """Completions of each prompt, which form a group."""
    fork_rows: CountOrZero = 0
    """Completions of each group that are left for the sequences of episodes whose history was rewritten."""
    source: CompletionSource = JaxSourceSection(type="jax")
    """Source of the completions."""
    top_k: CountOrZero = 0
    """Sample from the k most probable tokens; 0: from all."""
    top_p: Probability = 1.0
    """Sample from the most probable tokens with this total probability; 1: from all."""
    min_p: Fraction = 0.0
    """Sample from tokens with at least this fraction of the highest probability; 0: from all."""
    stop: Stops = ()
    """Stop strings; a completion includes the one that ends it."""
    slots: Size | None = None
    """jax: slots of continuous batching, refilled as rows end; null: one for each row."""
    mesh: SamplingMesh | None = None
    """Mesh of the weights for sampling, over the devices of `mesh`; null: chosen by the size of model and memory."""
    in_place: bool = False
    """Sample with the weights as the update lays them out, and copy none."""
    dtype: DType | None = None
    """Dtype in which sampling computes, and of its weights, also those sent to a server; null: that of the update."""
    record_log_probs: bool = True
    """Record the sampler's log-probs (rollout_log_probs)."""
    record_kept_tokens: bool = False
    """jax: record the tokens that top_k, top_p and min_p keep, and renormalise all log-probs over them; needs top_k."""
    mismatch_by_position: CountOrZero = 0
    """Report the mismatch of trainer and sampler in this many equal ranges of positions; 0: over all of them."""
    policy_lag: Lag = 0
    """Sample with the policy of this many steps ago; the state holds that many copies of the trained weights."""
    ahead: Lag = 0
    """openai and yours: request batches this many steps before they are trained, so that they are sampled meanwhile."""
    record: StoredPath | None = None
    """Write each rollout batch to a file in this directory, for `source.type=file`."""
