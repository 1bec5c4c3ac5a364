"""A run of the trainer without task, prompts and files: the same programs, called by hand."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import kljax
from train.config.load import parse
from train.config.plan import Plan
from train.config.schema import Config
from train.context import RunContext, make_bare_context
from train.data.tokenizers import Tokenizer
from train.models import Decoder
from train.models.sharding import make_mesh
from train.plan.shapes import TokenIds
from train.rl.objective import coefficients
from train.rl.policy import ScoredPolicy
from train.rl.reference import FrozenWeights
from train.rl.state import TrainState
from train.rl.step import update_rows
from train.run.programs import Programs
from train.run.setup import first_state
from train.sequences.batch import Batch


def grpo(prompt_length: int, completion_length: int, prompts: int, samples: int, **raw: Any) -> Config:
    """Returns the config of GRPO on `samples` completions of each prompt; further fields are as in a file."""
    lengths = {"max_prompt_length": prompt_length, "max_completion_length": completion_length}
    rollout = {"prompts_per_step": prompts, "samples_per_prompt": samples, **raw.pop("rollout", {})}
    return parse({"steps": 1, "data": lengths, "rollout": rollout, **raw})[0]


def bare_context(config: Config, model: Decoder, tokenizer: Tokenizer | None = None) -> RunContext:
    """Builds the context of a run on one device without task and prompts."""
    tokenizer = tokenizer or TokenIds(model.config.vocab_size, (0,))
    return make_bare_context(config, model, make_mesh(1, 1, 1), tokenizer)


@dataclasses.dataclass
class Learner:
    """A context with its programs, the frozen weights and the state, which updates replace."""

    context: RunContext
    programs: Programs
    frozen: FrozenWeights
    state: TrainState

    @classmethod
    def of(cls, context: RunContext, params: Any) -> "Learner":
        """Starts at the weights before RL, which are the reference's too."""
        config, model = context.config, context.model
        # An update donates the weights that it trains.
        first, base = (jax.tree.map(jnp.copy, params), None) if config.lora is None else (params, params)
        state = first_state(Plan.of(config), model, context.mesh, first, context.optimizer)
        frozen = FrozenWeights(base, ScoredPolicy(model, kljax.Policy(params if base is None else None)))
        return cls(context, Programs.of(context, state), frozen, state)

    def score(self, batch: Batch) -> Batch:
        """Adds the log-probs of the reference."""
        scored: Batch = self.programs.score(self.state.trainable, self.frozen.base, self.frozen.reference, batch)
        return scored

    def update(self, batch: Batch, advantages: np.ndarray | None = None) -> None:
        """Scores, prepares and updates; given `[rows]` advantages replace the computed ones."""
        batch, _, _ = self.programs.prepare(self.score(batch), self.state.controllers)
        if advantages is not None:
            tokens = jnp.where(batch.completion_mask, advantages[:, None], 0)
            batch = dataclasses.replace(batch, advantages=tokens)
        for rows in update_rows(self.context.config, jax.random.key(0)):
            coefs = coefficients(self.context.config)
            self.state, *_ = self.programs.update(self.state, self.frozen.base, batch, rows, coefs)
            jax.block_until_ready(self.state)
