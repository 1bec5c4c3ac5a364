"""Every field of a run, its default and its range. Under each field: what it means."""

import math
from typing import Annotated, Any, Literal

from pydantic import model_validator

from train.config.data import Data, task_lengths
from train.config.kl import KL
from train.config.model import MODEL_EXPECTED, Lora, Model, without_warm_start
from train.config.reference import BaseReference, Reference
from train.config.rewards import Rewards
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
    """Devices over which rows are split with replicated parameters."""
    fsdp: Count = 1
    """Devices over which rows and parameters are split."""
    tensor: Count = 1
    """Devices over which heads, MLP and vocabulary are split."""


class Tile(Section):
    tokens: Count
    """Positions whose logits exist at a time; more of them read the head less often."""
    vocab: Count
    """Entries of the vocabulary whose logits exist at a time."""


class LogProbs(Section):
    tile: Tile | None = None
    """Part of the logits that exists at a time, changes memory and speed; null: by the kind of device."""


class WarmStart(Section):
    steps: CountOrZero = 300
    """Supervised steps before RL; their result is the base."""
    batch_size: Count = 64
    """Rows of a supervised step."""
    learning_rate: Positive = 3e-3
    """Learning rate of the supervised steps."""
    checkpoint: Text | None = None
    """Start from this saved base instead of training one."""

    def trains(self) -> bool:
        """Whether a new run takes supervised steps."""
        return self.steps > 0 and self.checkpoint is None


class Advantage(Section):
    estimator: AdvantageEstimator = "grpo"
    """How rewards become advantages; gae brings a value head."""
    scale: Literal["std", "none"] = "std"
    """grpo: divide by the standard deviation of the group, or not."""
    gamma: Fraction = 1.0
    """gae, reinforce_plus_plus: discount per token."""
    lam: Fraction = 1.0
    """gae: decay of the temporal-difference errors."""
    whiten: bool = False
    """Whiten the advantages over the whole batch."""


class Loss(Section):
    policy: PolicyLoss = "ppo"
    """Policy loss."""
    clip_low: Fraction = 0.2
    """The ratio is clipped below at 1 - clip_low."""
    clip_high: NonNegative = 0.2
    """The ratio is clipped above at 1 + clip_high."""
    dual_clip: AboveOne | None = None
    """ppo: bound of the loss for negative advantages; null: none."""
    aggregation: Aggregation = "token_mean"
    """How per-token losses become one number."""
    max_length: Count | None = None
    """seq_mean_token_sum_norm: the constant length that is divided by."""
    empty_rows: EmptyRows = "drop"
    """Whether a row without a single token counts in a mean over sequences."""
    entropy_coef: NonNegative = 0.0
    """Coefficient of the entropy bonus."""
    value_coef: NonNegative = 0.0
    """gae: coefficient of the value loss."""
    value_clip: Positive | None = None
    """gae: how far a value may move from the old one; null: no clip."""


class Optim(Section):
    learning_rate: Positive = 3e-4
    """Learning rate of RL."""
    warmup_steps: CountOrZero = 0
    """Updates over which the learning rate rises; the first one is not wasted on a rate of 0."""
    decay_steps: CountOrZero = 0
    """Updates after the warm-up over which the learning rate falls linearly to a tenth, where it stays; 0: constant."""
    weight_decay: NonNegative = 0.0
    """Decoupled weight decay of AdamW."""
    b1: Decay = 0.9
    """AdamW: decay of the first moment."""
    b2: Decay = 0.95
    """AdamW: decay of the second moment."""
    eps: Positive = 1e-8
    """AdamW: epsilon."""
    max_grad_norm: Positive = 1.0
    """Global norm to which gradients are clipped."""
    updates_per_batch: Count = 1
    """Optimizer updates into which a rollout batch is split, prompts whole where the numbers allow it."""
    epochs: Count = 1
    """Passes over each rollout batch."""
    micro_batches: Count = 1
    """Micro-batches of an update; changes memory, never the result."""
    share_prompts: bool = True
    """A prompt goes through the model once for all of its completions; changes speed and memory, never the result."""


class Eval(Section):
    every: Count = 50
    """Steps between evaluations on held-out prompts."""
    prompts: Count = 256
    """Held-out prompts of an evaluation, at most."""
    batch_size: Count = 128
    """Rows that are sampled at once."""


class Checkpoint(Section):
    every: Count = 50
    """Steps between checkpoints."""
    keep: Count = 2
    """Newest checkpoints that are kept."""


class Config(Section):
    """One run. Defaults, then the YAML file, then `key=value` on the command line; nothing else."""

    name: RunName = "run"
    """Name of the run: the directory below output."""
    seed: Seed = 0
    """Seed of data, initialisation and sampling."""
    steps: Count
    """RL steps."""
    output: Text = "runs"
    """Directory of all runs."""
    temperature: Positive = 1.0
    """Temperature of the sampler and of every log-prob."""
    task: TaskName = "arithmetic"
    """What is trained on."""
    data: Data = Data()
    """Prompts and lengths."""
    rewards: Rewards = Rewards()
    """From what the verifier says to the one number that is optimised."""
    model: Annotated[Model, MODEL_EXPECTED] = Model()
    """A Hugging Face folder or the shape of a new decoder, and what it computes in."""
    lora: Lora | None = None
    """Train only an adapter; null: train all weights."""
    mesh: Mesh = Mesh()
    """Devices along each axis."""
    log_probs: LogProbs = LogProbs()
    """How log-probs are computed; there are never logits of all positions."""
    warm_start: WarmStart = WarmStart()
    """Supervised steps before RL."""
    rollout: Rollout = Rollout()
    """Sampling."""
    advantage: Advantage = Advantage()
    """From rewards to advantages."""
    loss: Loss = Loss()
    """From advantages to the loss."""
    kl: KL = KL()
    """The four places where KL enters."""
    reference: Reference = BaseReference(source="base")
    """What the reference KL is measured against."""
    optim: Optim = Optim()
    """AdamW and the split of a batch."""
    eval: Eval = Eval()
    """Evaluation on held-out prompts."""
    checkpoint: Checkpoint = Checkpoint()
    """Saving."""

    @model_validator(mode="before")
    @classmethod
    def _defaults_that_depend(cls, raw: Any) -> Any:
        """So that `task=gsm8k`, a larger operand or a folder is enough on top of a config that says nothing of it."""
        raw = without_warm_start(raw) if isinstance(raw, dict) else raw
        data = raw.get("data", {}) if isinstance(raw, dict) else None
        if not isinstance(data, dict):
            return raw
        return {**raw, "data": {**task_lengths(raw.get("task"), data), **data}}

    def needs_reference(self) -> bool:
        """Whether reference log-probs are computed at all."""
        coefs = (self.kl.reward.coef, self.kl.loss.coef, self.kl.advantage.coef)
        return self.reference.monitor or any(coef > 0 for coef in coefs)

    def needs_ref_log_probs(self) -> bool:
        """Whether anything reads the reference's log-probs of the drawn tokens, which the exact KL does not."""
        estimators = ((term.coef, term.estimator) for term in (self.kl.reward, self.kl.loss, self.kl.advantage))
        return self.reference.monitor or any(coef > 0 and estimator != "exact" for coef, estimator in estimators)

    def exact_loss(self) -> bool:
        """Whether the loss has the exact KL, so that hidden states of the reference are kept."""
        return self.kl.loss.coef > 0 and self.kl.loss.estimator == "exact"

    def exact_reward(self) -> bool:
        """Whether the reward has the exact KL."""
        return self.kl.reward.coef > 0 and self.kl.reward.estimator == "exact"

    def shares_head(self) -> bool:
        """Whether policy and reference have one LM head, which is then not trained."""
        return self.lora is not None and self.reference.source != "checkpoint"

    def needs_old_log_probs(self) -> bool:
        """Whether the log-probs of the policy before its updates take a pass of their own.

        With one update on a batch they are the log-probs of that update, unless something reads them before it.
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
        """Completions of one rollout batch."""
        return self.rollout.prompts_per_step * self.rollout.samples_per_prompt

    def shared_rows(self) -> int:
        """Consecutive rows whose one prompt goes through the model once: as many of it as a device has at a time."""
        if not self.optim.share_prompts:
            return 1
        parts = self.optim.updates_per_batch * self.optim.micro_batches * self.mesh.data * self.mesh.fsdp
        return math.gcd(self.rollout.samples_per_prompt, self.rows_per_batch() // parts)
