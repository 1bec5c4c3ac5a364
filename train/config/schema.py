"""The schema of a config: every field with its default, range and meaning."""

from typing import Annotated, Any, Literal

from pydantic import model_validator

from train.config.data import Data, Rewards, task_lengths
from train.config.kl import KL
from train.config.model import MODEL_EXPECTED, Lora, Model, without_warm_start
from train.config.reference import BaseReference, ReferenceSection
from train.config.rollout import Rollout
from train.config.types import (
    AboveOne,
    AdvantageEstimator,
    Aggregation,
    Count,
    CountOrZero,
    Decay,
    EmptyRows,
    Fraction,
    NonNegative,
    PolicyLoss,
    Positive,
    RunName,
    Section,
    Seed,
    TaskName,
    Text,
)


class Mesh(Section):
    data: Count = 1
    """Devices that split the rows and replicate the parameters."""
    fsdp: Count = 1
    """Devices that split rows and parameters."""
    tensor: Count = 1
    """Devices that split heads, MLP and vocabulary."""


class Tile(Section):
    tokens: Count
    """Tokens of a tile; more tokens read the LM head less often."""
    vocab: Count
    """Vocabulary entries of a tile."""


class LogProbs(Section):
    tile: Tile | None = None
    """Tile size of the chunked LM head, which changes memory and speed; null: chosen by the kind of device."""


class WarmStart(Section):
    steps: CountOrZero = 300
    """Supervised steps before RL, which make the base."""
    batch_size: Count = 64
    """Rows in a supervised step."""
    learning_rate: Positive = 3e-3
    """Learning rate of the supervised steps."""
    checkpoint: Text | None = None
    """Start from this saved base instead of a warm start."""

    def trains(self) -> bool:
        """Whether a new run has a warm start."""
        return self.steps > 0 and self.checkpoint is None


class Advantage(Section):
    estimator: AdvantageEstimator = "grpo"
    """Advantage estimator; gae trains a value head."""
    scale: Literal["std", "none"] = "std"
    """grpo: std divides by the standard deviation of the group."""
    gamma: Fraction = 1.0
    """gae, reinforce_plus_plus: discount per token."""
    lam: Fraction = 1.0
    """gae: the lambda that weights temporal-difference errors."""
    whiten: bool = False
    """Whiten the advantages over the whole batch."""


class Loss(Section):
    policy: PolicyLoss = "ppo"
    """Policy loss."""
    clip_low: Fraction = 0.2
    """Clips the importance ratio below at 1 - clip_low."""
    clip_high: NonNegative = 0.2
    """Clips the importance ratio above at 1 + clip_high."""
    dual_clip: AboveOne | None = None
    """ppo: upper bound of the loss, in units of the advantage, where the advantage is negative; null: none."""
    aggregation: Aggregation = "token_mean"
    """Reduction of the per-token losses."""
    max_length: Count | None = None
    """seq_mean_token_sum_norm: the constant length that divides each sum."""
    empty_rows: EmptyRows = "drop"
    """Whether a row without tokens counts in a mean over sequences."""
    entropy_coef: NonNegative = 0.0
    """Coefficient of the entropy bonus."""
    value_coef: NonNegative = 0.0
    """gae: coefficient of the value loss."""
    value_clip: Positive | None = None
    """gae: clip of a value's distance from the old value; null: none."""


class Optim(Section):
    learning_rate: Positive = 3e-4
    """Learning rate of RL."""
    warmup_steps: CountOrZero = 0
    """Updates of the linear warm-up; the first update has a rate above 0."""
    decay_steps: CountOrZero = 0
    """Updates after the warm-up over which the learning rate falls linearly to a tenth; 0: constant."""
    weight_decay: NonNegative = 0.0
    """Decoupled weight decay of AdamW."""
    b1: Decay = 0.9
    """AdamW: decay of the first moment."""
    b2: Decay = 0.95
    """AdamW: decay of the second moment."""
    eps: Positive = 1e-8
    """AdamW: epsilon."""
    max_grad_norm: Positive = 1.0
    """Clips the global norm of the gradient."""
    updates_per_batch: Count = 1
    """Optimizer updates per rollout batch; completions of one prompt stay together where the numbers allow it."""
    epochs: Count = 1
    """Passes over each rollout batch."""
    micro_batches: Count = 1
    """Micro-batches of an update; changes memory, not the result."""
    share_prompts: bool = True
    """Run a prompt through the model once for all of its completions; changes speed and memory, not the result."""


class Eval(Section):
    every: Count = 50
    """Steps between evaluations on held-out prompts."""
    prompts: Count = 256
    """Largest number of held-out prompts in an evaluation."""
    batch_size: Count = 128
    """Rows sampled at once."""


class Checkpoint(Section):
    every: Count = 50
    """Steps between checkpoints."""
    keep: Count = 2
    """Number of newest checkpoints to keep."""


class Config(Section):
    """The config of one run: defaults < YAML file < `key=value` on the command line."""

    name: RunName = "run"
    """Name of the run, and of its directory below output."""
    seed: Seed = 0
    """Seed of data, initialisation and sampling."""
    steps: Count
    """RL steps."""
    output: Text = "runs"
    """Directory of all runs."""
    temperature: Positive = 1.0
    """Temperature of the sampler and of every log-prob."""
    task: TaskName = "arithmetic"
    """The task to train on."""
    data: Data = Data()
    """Prompts and lengths."""
    rewards: Rewards = Rewards()
    """How task rewards are combined into the scalar reward."""
    model: Annotated[Model, MODEL_EXPECTED] = Model()
    """A Hugging Face folder or the shape of a new decoder, and its dtypes."""
    lora: Lora | None = None
    """Train a LoRA adapter only; null: train all weights."""
    mesh: Mesh = Mesh()
    """Devices along each mesh axis."""
    log_probs: LogProbs = LogProbs()
    """How log-probs are computed; logits of all positions never exist."""
    warm_start: WarmStart = WarmStart()
    """Supervised steps before RL."""
    rollout: Rollout = Rollout()
    """Sampling of completions."""
    advantage: Advantage = Advantage()
    """The advantage estimator."""
    loss: Loss = Loss()
    """The policy loss, its reduction, entropy and value terms."""
    kl: KL = KL()
    """The four placements of KL."""
    reference: ReferenceSection = BaseReference(source="base")
    """The reference policy of the KL."""
    optim: Optim = Optim()
    """AdamW, and how a rollout batch is split into updates."""
    eval: Eval = Eval()
    """Evaluation on held-out prompts."""
    checkpoint: Checkpoint = Checkpoint()
    """Checkpoints."""

    @model_validator(mode="before")
    @classmethod
    def _defaults_that_depend(cls, raw: Any) -> Any:
        """Fills in defaults that depend on other fields, so that `task=gsm8k` or `model.path` alone is enough."""
        raw = without_warm_start(raw) if isinstance(raw, dict) else raw
        data = raw.get("data", {}) if isinstance(raw, dict) else None
        if not isinstance(data, dict):
            return raw
        return {**raw, "data": {**task_lengths(raw.get("task"), data), **data}}

    def needs_reference(self) -> bool:
        """Whether any term or metric needs the reference."""
        coefs = (self.kl.reward.coef, self.kl.loss.coef, self.kl.advantage.coef)
        return self.reference.monitor or any(coef > 0 for coef in coefs)

    def needs_ref_log_probs(self) -> bool:
        """Whether any term needs the reference's log-probs of the sampled tokens; the exact KL does not."""
        estimators = ((term.coef, term.estimator) for term in (self.kl.reward, self.kl.loss, self.kl.advantage))
        return self.reference.monitor or any(coef > 0 and estimator != "exact" for coef, estimator in estimators)

    def exact_loss(self) -> bool:
        """Whether the loss has the exact KL, which needs the reference's hidden states."""
        return self.kl.loss.coef > 0 and self.kl.loss.estimator == "exact"

    def exact_reward(self) -> bool:
        """Whether the reward has the exact KL."""
        return self.kl.reward.coef > 0 and self.kl.reward.estimator == "exact"

    def shares_head(self) -> bool:
        """Whether policy and reference share the LM head, which is then frozen."""
        return self.lora is not None and self.reference.source != "checkpoint"

    def needs_old_log_probs(self) -> bool:
        """Whether the old log-probs take a forward pass of their own.

        With one update per batch they are the log-probs of that update, unless an earlier step reads them.
        """
        sampled_reward = self.kl.reward.coef > 0 and self.kl.reward.estimator != "exact"
        several = self.optim.updates_per_batch * self.optim.epochs > 1
        return several or sampled_reward or self.kl.advantage.coef > 0

    def needs_rollout_log_probs(self) -> bool:
        """Whether the objective reads the sampler's log-probs."""
        return self.kl.rollout.coef > 0

    def has_value_head(self) -> bool:
        """Whether a value head is trained."""
        return self.advantage.estimator == "gae"

    def rows_per_batch(self) -> int:
        """Number of completions in a rollout batch."""
        return self.rollout.prompts_per_step * self.rollout.samples_per_prompt
