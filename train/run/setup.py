"""Setting up a run: the context, the base weights, and the state before RL."""

import dataclasses
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import optax
from jax.sharding import Mesh

from kljax.checkpoint import text_hash
from train.config.errors import UserError, field_errors
from train.config.installation import shell_command
from train.config.load import fill_mesh, with_absolute_paths
from train.config.plan import Plan
from train.config.schema import Config
from train.config.storage import is_address
from train.context import RunContext, make_bare_context
from train.data.prompts import Prompts, Supervised, check_solutions, keep_prompts
from train.data.tasks import Example, Task, load_task
from train.data.tasks.rewards import compose, judge, warn_of_unweighted
from train.data.tasks.user_score import UserScore
from train.data.tokenizers import Tokenizer, load_tokenizer
from train.data.tokenizers.folder import FolderTokenizer
from train.data.tokenizers.generation_config import warn_of_generation_config
from train.data.tokenizers.rendered import RenderedTokenizer
from train.distributed.exchange import on_leader, run_together
from train.distributed.global_arrays import device_count, processes_of
from train.distributed.peer_watch import enter
from train.distributed.peers import processes
from train.models import Decoder
from train.models.parameters import init_adapter, init_params, init_value_head
from train.models.sharding import HOST, make_mesh, replicated
from train.references.find import warn_of_other_base
from train.rl.algorithms import make_controllers
from train.rl.host_memory import has_host_memory
from train.rl.keys import purpose_key
from train.rl.state import TrainState, initial_state
from train.rollouts.episodes.environments import Environments
from train.rollouts.lag import initial_past
from train.run.base_weights import load_initial_base, quantize_if_needed, record_folder
from train.run.directory import RunDirectory
from train.run.display import Start
from train.run.guard import check_finite
from train.run.metrics import Metrics
from train.run.warm_start import warm_start
from train.weights.gguf import imported_folder, is_gguf
from train.weights.hub import hub_folder
from train.weights.huggingface import check_folder
from train.weights.model import make_policy_model, trained_pad, unquantized, warn_of_pad
from train.weights.orbax import save_base
from train.weights.peft import check_adapter, load_adapter

Tree = Any


def with_local_model(config: Config) -> Config:
    """Returns a config whose `model.path` is a folder: downloads a name on the Hub, imports a GGUF file.

    Each process asks for the files of a name, as every host has a cache of its own; GGUF files are imported by the
    leader. Neither is done again.

    Raises:
      UserError: the Hub does not give the commit; or the GGUF file is damaged or not understood, or the folder beside
        it was made of another file or cannot be written.
    """
    path = config.model.path
    revision = config.model.revision
    if path is not None and is_address(path):
        return config
    if path is not None and revision is not None and Path(path).name != revision:
        folder = run_together("model", lambda: str(hub_folder(path, revision)))
    elif path is not None and is_gguf(path):
        folder = on_leader("model", lambda: _import_beside(path))
    else:
        return config
    return config.model_copy(update={"model": config.model.model_copy(update={"path": folder})})


def _import_beside(path: str) -> str:
    """Imports a GGUF file, unless it was before; returns the folder beside it."""
    try:
        with field_errors("model.path"):
            return str(imported_folder(path))
    except OSError as error:
        raise UserError(
            f"model.path: cannot import {path} beside it: {error.strerror or error}; "
            f"run {shell_command('train.import')} {path} --to FOLDER, and set model.path to the folder"
        ) from error


def make_context(config: Config) -> RunContext:
    """Builds the run context in every process; every mistake that can be found here is found before RL starts.

    Its config has absolute paths, wherever code of the user goes, and the sizes of all axes.

    Raises:
      UserError: in every process: data, tokenizer or model do not fit the config, or the devices do not fit it.
    """
    config = fill_mesh(with_absolute_paths(config), device_count())
    mesh = config_mesh(config)
    if config.optim.host_memory and not has_host_memory(mesh.local_devices[0]):
        kind = mesh.local_devices[0].device_kind
        raise UserError(f"optim.host_memory: got true, but programs of {kind} have no {HOST} memory; set it to false")
    tokenizer, model, task, prompts, held_out = run_together("data", lambda: _load_data(config))
    context = make_bare_context(config, model, mesh, tokenizer)
    return dataclasses.replace(context, task=task, prompts=prompts, held_out=held_out)


def _load_data(config: Config) -> tuple[Tokenizer, Decoder, Task, Prompts, list[Example]]:
    """Loads the tokenizer and the examples, and makes the decoder for them; no process waits for another."""
    tokenizer = tell_tools(config, load_tokenizer(config))
    task = load_task(config)
    if config.model.path is not None:
        warn_of_generation_config(config.model.path)
    prompts = Prompts(
        task.train,
        tokenizer,
        length=config.data.max_prompt_length,
        batch_size=config.rollout.prompts_per_step,
        seed=config.seed,
    )
    held_out = list(task.eval) if config.eval.prompts else []
    if held_out:
        held_out = keep_prompts(held_out, tokenizer, config.data.max_prompt_length, label="held-out prompts")
    warn_of_pad_in_prompts(config, prompts)
    return tokenizer, make_policy_model(config, tokenizer), task, prompts, held_out[: config.eval.prompts]


def tell_tools(config: Config, tokenizer: Tokenizer) -> Tokenizer:
    """Returns the tokenizer whose prompts tell the tools of the environment, as its episodes do with a chat template.

    Raises:
      UserError: the environment cannot be imported, or is none, or a renderer does not go with the tokenizer.
    """
    if not isinstance(tokenizer, FolderTokenizer):
        return tokenizer
    folder = tokenizer
    tokenizer = with_renderer(config, folder)
    if config.environment is not None and tokenizer.has_template:
        with closing(Environments(config.environment)) as environments:
            tokenizer = tokenizer.with_tools(environments.tools)
    if isinstance(tokenizer, RenderedTokenizer):
        tokenizer.warn_of_template(folder)
    return tokenizer


def with_renderer(config: Config, tokenizer: FolderTokenizer) -> FolderTokenizer:
    """Returns the tokenizer in the form of the model family that the config names, if it names one.

    Raises:
      UserError: the package renderers is missing or does not know the family, or this does not go with the tokenizer.
    """
    renderer = config.renderer()
    if renderer is None:
        return tokenizer
    field, family = renderer
    return RenderedTokenizer(tokenizer, family, config.data.template_arguments, field)


def warn_of_pad_in_prompts(config: Config, prompts: Prompts) -> None:
    """Warns if prompts have the token whose embedding transformers does not train, and this run does."""
    pad = trained_pad(config)
    examples = prompts.examples
    count = 0 if pad is None else sum(pad in np.asarray(example.prompt_ids) for example in examples)
    warn_of_pad(pad, count, len(examples), "prompts")


def data_digest(context: RunContext) -> str:
    """Computes a digest of the tokens of all prompts, with which processes notice that their files differ."""
    rows = (np.asarray(example.prompt_ids, "<i4") for example in (*context.prompts.examples, *context.held_out))
    return text_hash(b"".join(b"%d:%s" % (len(row), row.tobytes()) for row in rows)).hexdigest()


def config_mesh(config: Config) -> Mesh:
    """Makes the mesh of the config; raises `UserError` if the devices do not fit it, or a process has none in it."""
    try:
        mesh = make_mesh(**fill_mesh(config, device_count()).mesh.model_dump())
    except ValueError as error:
        raise UserError(str(error)) from error
    idle = sorted(set(range(processes())) - processes_of(mesh))
    if idle:
        raise UserError(
            f"mesh: got {mesh.size} of {device_count()} devices, and none of process {idle[0]}; let the mesh use all "
            "devices, or start fewer processes"
        )
    return mesh


def check_examples(context: RunContext, *, before_warm_start: bool) -> None:
    """Judges an empty completion of an example, if the task has any, and checks the solutions for a warm start.

    Args:
      before_warm_start: whether the warm start of this run is still to come.

    Raises:
      UserError: the reward function fails or returns no numbers, a weight names an unknown reward, an example has no
        solution, or no solution fits.
    """
    config = context.config
    examples = context.prompts.examples
    if judged := (examples or context.held_out)[:1]:
        scores = judge(context.task, judged, [""], np.array([True]))
        compose(config.rewards, scores, np.array([1]), longest=config.data.max_completion_length)
    if isinstance(context.task.score, UserScore):
        warn_of_unweighted(config.rewards.weights, context.task.score.names or ())
    if before_warm_start and config.warm_start.trains():
        check_solutions(examples, context.tokenizer, config.data.max_completion_length)


def check_start(config: Config, model: Decoder) -> None:
    """Raises `UserError`, from metadata alone, if weights that the config starts from are missing or do not fit."""
    if config.model.path is not None and config.warm_start.checkpoint is None:
        with field_errors("model.path"):
            check_folder(config.model.path, model)
    if config.lora is not None and config.lora.path is not None:
        with field_errors("lora.path"):
            check_adapter(config.lora.path, model)
            warn_of_other_base(config, config.lora.path, "lora.path")


def make_base(context: RunContext, directory: RunDirectory, *, bars: Start, writer: Metrics) -> Tree:
    """Makes the base of a new run: loads or draws the weights, runs the warm start, saves the result.

    A Hugging Face folder without a warm start is recorded, not copied. Weights are saved before they are quantized.
    """
    config = context.config
    mesh = context.mesh
    section = context.config.warm_start
    if config.model.path is not None and section.checkpoint is None and not section.trains():
        params = load_initial_base(config, context.model, mesh)
        record_folder(directory.root, config.model.path)
        return params
    model = unquantized(context.model)
    params = load_initial_base(config, model, mesh)
    if params is None:
        params = init_params(model, purpose_key(config.seed, "params"), mesh)
    if section.trains():
        unquantized_context = dataclasses.replace(context, model=model)
        params = _run_warm_start(unquantized_context, params, bars=bars, writer=writer)
        check_finite(params, "warm start")
    save_base(directory.base, params, {"metrics": writer.mark(), **directory.identity})
    return quantize_if_needed(context.model, params)


def load_initial_adapter(config: Config, model: Decoder, mesh: Mesh) -> Tree:
    """Loads the adapter at `lora.path`, or draws a new one, which changes nothing yet."""
    if config.lora is None or config.lora.path is None:
        return init_adapter(model, purpose_key(config.seed, "adapter"), mesh)
    with field_errors("lora.path"):
        return load_adapter(config.lora.path, model, mesh, allow_nonfinite=config.model.allow_nonfinite)


def first_state(
    plan: Plan, model: Decoder, mesh: Mesh, base: Tree, optimizer: optax.GradientTransformation
) -> TrainState:
    """Makes the state before RL. Without LoRA the base weights become trainable; with LoRA they stay frozen."""
    config = plan.config
    trainable: dict[str, Tree] = {"params": base}
    if config.lora is not None:
        trainable = {"adapter": load_initial_adapter(config, model, mesh)}
    if plan.value_head:
        trainable["value_head"] = init_value_head(model, purpose_key(config.seed, "value_head"), mesh)
    controllers = make_controllers(plan)
    state = initial_state(trainable, optimizer, controllers, replicated(mesh), in_host=config.optim.host_memory)
    return dataclasses.replace(state, past=initial_past(trainable, config.rollout.policy_lag))


def _run_warm_start(context: RunContext, params: Tree, *, bars: Start, writer: Metrics) -> Tree:
    """Trains the weights on the solutions of the task, and writes the loss of each step."""
    config = context.config
    section = context.config.warm_start
    data = Supervised(
        context.prompts.examples,
        context.tokenizer,
        prompt_length=config.data.max_prompt_length,
        completion_length=config.data.max_completion_length,
        length=config.data.row_length(),
        batch_size=section.batch_size,
        seed=config.seed,
    )
    advance = bars("warm start", section.steps, 0)

    enter(0, "warm start")

    def report(step: int, values: dict[str, float]) -> None:
        enter(step, "warm start")
        writer.write("warm_start", step, values)
        advance(f"loss {values['loss']:.3f}")

    return warm_start(context, params, data, report)
