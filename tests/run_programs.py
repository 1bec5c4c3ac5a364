"""Programs, and the order of examples, that the runs of one test process share."""

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from jax.sharding import Mesh

from train.config.plan import Plan
from train.config.schema import Config
from train.data import prompts
from train.models import Decoder
from train.references import store
from train.rollouts import jax_source
from train.run import programs, recorder, warm_start


@contextlib.contextmanager
def shared_by_runs() -> Iterator[None]:
    """Lets runs inside the block share the programs that are alike by their configs.

    A run makes its programs anew, and tracing them takes most of its time. Two runs that share a program which does not
    fit both fail: no program may be traced twice.
    """
    with pytest.MonkeyPatch.context() as patch:
        for name in ("make_score", "make_prepare", "make_update", "make_control"):
            key_of = _step_key if name == "make_score" else _update_key
            patch.setattr(programs, name, _once(getattr(programs, name), key_of))
        patch.setattr(store, "make_reference_score", _once(store.make_reference_score, _step_key))
        patch.setattr(jax_source, "sampling_program", _once(jax_source.sampling_program, _sampler_key))
        patch.setattr(recorder, "make_select", functools.cache(recorder.make_select))
        patch.setattr(warm_start, "make_step", _once(warm_start.make_step, _warm_start_key))
        # The shuffle of a dozen examples takes a millisecond for each of a batch.
        made = prompts.shuffled
        patch.setattr(prompts, "shuffled", functools.cache(lambda *arguments: functools.cache(made(*arguments))))
        yield


def _once(make: Callable[..., Any], key_of: Callable[..., Any]) -> Callable[..., Any]:
    """Wraps a function that makes a program: it makes one for each key."""
    programs: dict[Any, Any] = {}

    def made(*arguments: Any, **options: Any) -> Any:
        key = key_of(*arguments, **options)
        if key not in programs:
            programs[key] = make(*arguments, **options)
        return programs[key]

    return made


def _step_key(plan: Plan, *others: Any) -> Any:
    """The config without the fields that no program of an RL step reads, the decoder and the mesh."""
    return _config_key(plan.config, *others)


def _config_key(config: Config, *others: Any) -> Any:
    unread: dict[str, Any] = {"name": "", "output": "", "seed": 0, "warm_start": None, "eval": None, "checkpoint": None}
    unread["report"] = None
    if hasattr(config.reference, "path"):
        unread["reference"] = config.reference.model_copy(update={"path": ""})
    return config.model_copy(update=unread), *(item for item in others if isinstance(item, Decoder | Mesh))


def _update_key(plan: Plan, *others: Any, per_token: bool = False) -> Any:
    """The same without the source of the reference, which only scoring goes through; whether it has a head counts."""
    config = plan.config
    read = config.reference.monitor, config.reference.source == "checkpoint"
    return per_token, _config_key(config.model_copy(update={"reference": read}), *others)


def _sampler_key(context: Any, *options: Any, sampling: Any, stop: Any) -> Any:
    """The decoder, the mesh, and the sections that a sampler reads; the stop texts are those of the config."""
    config = context.config
    sections = config.data, config.model, config.rollout, config.eval.batch_size
    return context.model, context.mesh, sections, options, sampling


def _warm_start_key(config: Config, model: Decoder, optimizer: Any, start: Any, mesh: Mesh) -> Any:
    """The decoder, the mesh, and the sections that a supervised step reads."""
    return config.warm_start, config.optim, config.temperature, config.data, config.log_probs, model, mesh
