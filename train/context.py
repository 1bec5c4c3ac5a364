"""The run context: objects that a run builds from its config before the first step."""

import dataclasses
from typing import Any, cast

import optax
from jax.sharding import Mesh

from train.config.plan import Plan
from train.config.schema import Config
from train.data.prompts import Prompts
from train.data.tasks import Example, Task
from train.data.tokenizers import Tokenizer
from train.models import Decoder
from train.rl.host_memory import make_run_optimizer
from train.rollouts.layout import SamplingLayout
from train.rollouts.make_layout import device_memory, make_layout, resident_bytes
from train.weights.remat import RematChoice, choose_remat, with_remat


@dataclasses.dataclass(frozen=True)
class RunContext:
    """The config and the objects built from it; complete when made, constant during the run.

    Attributes:
      plan: the needs of the config, derived once.
      layout: the layout of the weights for sampling, which rollouts and evaluations share.
      prompts: the training prompts, by step.
      held_out: the held-out examples of an evaluation.
      remat: how `model.remat: auto` was resolved; None: the config names it.
    """

    plan: Plan
    mesh: Mesh
    model: Decoder
    optimizer: optax.GradientTransformation
    layout: SamplingLayout
    tokenizer: Tokenizer
    task: Task
    prompts: Prompts
    held_out: list[Example]
    remat: RematChoice | None = None

    @property
    def config(self) -> Config:
        """The config of the run."""
        return self.plan.config


def make_bare_context(config: Config, model: Decoder, mesh: Mesh, tokenizer: Tokenizer) -> RunContext:
    """Builds a context without task and prompts, which no program reads."""
    plan = Plan.of(config)
    optimizer = make_run_optimizer(config.optim)
    none = cast(Any, None)
    memory = device_memory(mesh)
    remat = None
    if config.model.remat == "auto":
        resident = resident_bytes(plan, model, mesh, optimizer)
        remat = choose_remat(plan, model, mesh, resident=resident, memory=memory)
        plan = Plan.of(with_remat(config, remat.remat))
        model = Decoder(dataclasses.replace(model.config, remat=remat.remat))
    layout = make_layout(plan, model, mesh, optimizer, memory=memory)
    return RunContext(
        plan, mesh, model, optimizer, layout, tokenizer, task=none, prompts=none, held_out=[], remat=remat
    )
