"""The schema of a config: every field with its default, range and meaning."""

from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, model_validator

from train.config.correction import CorrectionSection, default_correction
from train.config.data import Data, Rewards, task_lengths
from train.config.environment import EnvironmentSection
from train.config.kl import KL
from train.config.loss import DEFAULT_ADVANTAGE, DEFAULT_LOSS, AdvantageSection, LossSection
from train.config.mesh import ROW_AXES, Mesh
from train.config.model import MODEL_EXPECTED, Lora, Model, without_warm_start
from train.config.optim import Optim
from train.config.rollout import RolloutSection, recording_defaults
from train.config.routing import Routing
from train.config.types import (
    CacheDirectory,
    Count,
    CountOrZero,
    Decay,
    Fraction,
    Monitor,
    NonNegative,
    PathText,
    Port,
    Positive,
    RunName,
    Seconds,
    Section,
    Seed,
    StoredPath,
    TaskName,
    Text,
    TracedSteps,
    XlaFlags,
    tag_defaults_to,
)


class TileSection(Section):
    tokens: Count
    """Tokens of a tile; more tokens read the LM head less often."""
    vocab: Count
    """Vocabulary entries of a tile."""


class LogProbs(Section):
    tile: TileSection | None = None
    """Tile size of the chunked LM head, which changes memory and speed; null: chosen by the kind of device."""
    token_chunk: Count | None = None
    """Tokens whose logits are held at once where the loss is fused with the head; null: by the kind of device."""


class WarmStart(Section):
    steps: CountOrZero = 300
    """Supervised steps before RL, which make the base."""
    batch_size: Count = 64
    """Rows in a supervised step."""
    learning_rate: Positive = 3e-3
    """Learning rate of the supervised steps."""
    checkpoint: StoredPath | None = None
    """Start from this saved base instead of a warm start."""

    def trains(self) -> bool:
        """Whether a new run has a warm start."""
        return self.steps > 0 and self.checkpoint is None


class BaseReference(Section):
    source: Literal["base"]
    """`base`: adapter off, or the weights before RL; `step`: of this run; others: saved, or an average."""
    refresh_every: Count | None = None
    """base, step: replace the reference by the policy every so many steps; null: never."""
    monitor: Monitor = False
    """Measure the KL to the reference even if no coefficient needs it; `exact`: over the whole vocabulary."""


class StepReference(Section):
    source: Literal["step"]
    step: CountOrZero
    """step: the step of this run that is the reference; 0 is the policy before RL."""
    refresh_every: Count | None = None
    monitor: Monitor = False


class AdapterReference(Section):
    source: Literal["adapter"]
    path: StoredPath
    """adapter: a PEFT folder or orbax directory; checkpoint: a Hugging Face folder or orbax directory."""
    monitor: Monitor = False


class CheckpointReference(Section):
    source: Literal["checkpoint"]
    path: StoredPath
    monitor: Monitor = False


class EmaReference(Section):
    source: Literal["ema"]
    decay: Decay = 0.99
    """ema: weight of the old average after each step; the new policy has the rest."""
    monitor: Monitor = False


class BemaReference(Section):
    source: Literal["bema"]
    power: NonNegative = 0.5
    """bema: how fast the average slows down with the steps; 0 takes the policy."""
    bias_power: NonNegative = 0.2
    """bema: how fast the correction, a part of the policy's whole way, gets smaller."""
    multiplier: NonNegative = 1.0
    """bema: weight of a step in the age of the average."""
    lag: Positive = 10.0
    """bema: age of the average before the first step."""
    min_rate: Fraction = 0.0
    """bema: least weight of the new policy in the average."""
    every: Count = 1
    """bema: steps between two moves of the average."""
    monitor: Monitor = False


ReferenceSection = Annotated[
    BaseReference | StepReference | AdapterReference | CheckpointReference | EmaReference | BemaReference,
    Field(discriminator="source"),
    BeforeValidator(tag_defaults_to("source", "base")),
]


class Guard(Section):
    """Answers to numbers that are not finite, and to KL and entropy beyond their limits."""

    max_skipped: Count = 5
    """Updates in a row that may be skipped, not finite or beyond a limit (`skip`), before the run stops."""
    max_kl: Positive | None = 10.0
    """Limit of a step's mean KL to the reference, nats per token, where it is measured; null: none."""
    max_token_kl: Positive | None = 1e6
    """Limit of the KL at one token that a step estimates, to the reference or of `kl.rollout`, nats; null: none."""
    min_entropy: Positive | None = None
    """Limit of a step's mean entropy of the policy, nats per token; null: none."""
    action: Literal["warn", "skip", "stop", "roll_back", "lower_learning_rate"] = "warn"
    """Beyond a limit: `warn`; `skip` the update; `stop`; `roll_back` to the last checkpoint; `lower_learning_rate`."""
    learning_rate_factor: Annotated[float, Field(gt=0, lt=1)] = 0.5
    """lower_learning_rate: what the learning rate is multiplied by each time."""
    max_actions: Count = 3
    """roll_back, lower_learning_rate: how often, before the run stops."""


class Eval(Section):
    every: Count = 50
    """Steps between evaluations on held-out prompts."""
    prompts: CountOrZero = 256
    """Largest number of held-out prompts in an evaluation; 0, as `eval: null`: no evaluation."""
    batch_size: Count = 128
    """Rows sampled at once; completions are the same for any number, apart from rounding."""
    greedy: bool = True
    """Also take the most probable tokens, for `accuracy_greedy`: each prompt is then completed twice."""
    source: Literal["jax", "rollout"] = "jax"
    """What completes held-out prompts: `jax`, the sampler of this process; `rollout`, the source of the rollouts."""

    def rows(self) -> int:
        """Returns the number of rows that an evaluation samples at once; 0 without evaluations."""
        return self.batch_size if self.prompts else 0


class EmergencySection(Section):
    """States in the memory of other slices, from which a lost slice is restored."""

    folder: PathText = "/dev/shm/kljax"
    """Directory in the memory of each host, which a restart of the process leaves in place."""
    every: Count = 1
    """Steps between two states in memory."""


class Checkpoint(Section):
    every: Count = 50
    """Steps between checkpoints."""
    keep: Count = 2
    """Number of newest checkpoints to keep."""
    keep_every: Count | None = None
    """Also keep the checkpoints of steps that this divides, a multiple of every; null: none."""
    emergency: EmergencySection | None = None
    """States in the memory of other slices between two checkpoints, with `mesh.slices`; null: none."""


class ReportSection(Section):
    """Records for the page of a run, which `python -m train.report` makes."""

    rollouts: CountOrZero = 16
    """Rollouts of each step that are recorded with the values of every token, by whole groups; 0: none."""
    max_mib: Count = 256
    """Size limit of recorded rollouts in MiB; beyond it every other recorded step is deleted."""
    wandb: Text | None = None
    """Project of Weights & Biases that gets the metrics too; null: none. WANDB_MODE=offline writes files alone."""
    prometheus_port: Port | None = None
    """Port at which Prometheus reads the last metrics as text, on all interfaces; null: none."""
    health_port: Port | None = None
    """Port at which every process answers /healthz with its step and the time of its last progress; null: none."""
    unhealthy_after: Seconds | None = None
    """Seconds without progress after which /healthz answers 503, longer than any step or evaluation; null: never."""


class Profile(Section):
    steps: TracedSteps | None = None
    """First and last step that `jax.profiler` traces, on the devices of process 0, into `profile/`; null: none."""


class Log(Section):
    format: Literal["text", "json"] = "text"
    """Form of the lines on the terminal; `json`: an object a line with time, process, level and text."""


class Config(Section):
    """The config of one run: defaults < YAML file < `key=value` on the command line."""

    name: RunName = "run"
    """Name of the run, and of its directory below output."""
    seed: Seed = 0
    """Seed of data, initialisation and sampling."""
    steps: Count
    """RL steps."""
    preset: Text | None = None
    """Algorithm of another system, as `trl/grpo`; the other fields go before its own. configs/presets has them."""
    output: StoredPath = "runs"
    """Directory of all runs."""
    temperature: Positive = 1.0
    """Temperature of the sampler and of every log-prob."""
    task: TaskName = "arithmetic"
    """The task; `recording`: rewards of recorded completions; `module:function`: yours, which returns a `Task`."""
    data: Data = Data()
    """Prompts and lengths."""
    rewards: Rewards = Rewards()
    """How task rewards are combined into the scalar reward."""
    model: Annotated[Model, MODEL_EXPECTED] = Model()
    """A Hugging Face folder or the shape of a new decoder, and its dtypes."""
    lora: Lora | None = None
    """Train a LoRA adapter only; null: train all weights."""
    compile_cache: CacheDirectory = True
    """Directory of compiled programs, for later starts; true: that of the user; false: none is kept."""
    xla_flags: XlaFlags = "auto"
    """Flags of the compiler of GPUs: auto adds those that change no result, and 90 % of the memory; none adds none."""
    mesh: Mesh = Mesh()
    """Devices along each mesh axis."""
    log_probs: LogProbs = LogProbs()
    """How log-probs are computed; logits of all positions never exist."""
    warm_start: WarmStart = WarmStart()
    """Supervised steps before RL."""
    rollout: RolloutSection = RolloutSection()
    """Sampling of completions."""
    environment: EnvironmentSection | None = None
    """The environment of episodes of several turns; null: a completion is one turn."""
    routing: Routing = Routing()
    """The experts that an update uses, in a mixture of experts."""
    correction: CorrectionSection = ()
    """Weights and masks for the mismatch of trainer and sampler, in this order; on by default with a server."""
    advantage: AdvantageSection = DEFAULT_ADVANTAGE
    """The advantage estimator."""
    loss: LossSection = DEFAULT_LOSS
    """The policy loss, its reduction, entropy and value terms."""
    kl: KL = KL()
    """The four placements of KL."""
    reference: ReferenceSection = BaseReference(source="base")
    """The reference policy of the KL."""
    optim: Optim = Optim()
    """The optimizer, and how a rollout batch is split into updates."""
    guard: Guard = Guard()
    """Numbers that are not finite, and limits of KL and entropy."""
    eval: Annotated[Eval, BeforeValidator(lambda value: {"prompts": 0} if value in (None, False) else value)] = Eval()
    """Evaluation on held-out prompts."""
    checkpoint: Checkpoint = Checkpoint()
    """Checkpoints."""
    report: ReportSection = ReportSection()
    """Records for the page of a run."""
    profile: Profile = Profile()
    """Traces of the devices."""
    log: Log = Log()
    """Lines on the terminal."""

    @model_validator(mode="before")
    @classmethod
    def _defaults_that_depend(cls, raw: Any) -> Any:
        """Fills in defaults that depend on other fields, so that `task=gsm8k` or `model.path` alone is enough."""
        if isinstance(raw, dict):
            raw = recording_defaults(without_warm_start(raw))
            raw = {"correction": default_correction(raw), **raw}
        data = raw.get("data", {}) if isinstance(raw, dict) else None
        if not isinstance(data, dict):
            return raw
        return {**raw, "data": {**task_lengths(raw.get("task"), data), **data}}

    def with_devices(self, count: int) -> "Config":
        """Returns the config of this many devices, with sizes in place of -1 in `mesh` and `rollout.mesh`.

        Raises:
          ValueError: the other sizes do not divide the devices.
        """
        mesh = self.mesh.filled(count)
        sampling = self.rollout.mesh
        rollout = self.rollout
        if sampling is not None:
            rollout = rollout.model_copy(update={"mesh": sampling.filled(mesh)})
        return self.model_copy(update={"mesh": mesh, "rollout": rollout})

    def runs_episodes(self) -> bool:
        """Whether a completion is an episode, of an environment or of an agent program."""
        return self.environment is not None or self.rollout.source.type == "endpoint"

    def renderer(self) -> tuple[str, str] | None:
        """Returns the family of the package renderers that writes conversations, behind its field; None for none."""
        source = self.rollout.source
        if self.environment is not None and self.environment.renderer is not None:
            return "environment.renderer", self.environment.renderer
        if source.type == "endpoint" and source.renderer is not None:
            return "rollout.source.renderer", source.renderer
        return None

    def rows_per_batch(self) -> int:
        """Number of completions in a rollout batch."""
        return self.rollout.prompts_per_step * self.rollout.samples_per_prompt

    def rows_per_micro_batch(self) -> int:
        """Number of rows of a micro-batch that one device has."""
        parts = self.optim.updates_per_batch * self.optim.micro_batches
        return self.rows_per_batch() // (parts * self.mesh.parts(ROW_AXES).count)
