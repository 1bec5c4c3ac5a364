"""The reference that a run starts or goes on with."""

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from jax.sharding import Mesh

from train.config.schema import Config
from train.models import Decoder
from train.references.moving import moves, start_moving, staying
from train.references.record import is_recorded, record_reference, reference_fingerprint
from train.references.sources import load_reference
from train.rl.reference import Reference
from train.rl.state import TrainState
from train.weights.checkpoint import Checkpoints

Tree = Any


def begin_reference(
    config: Config,
    model: Decoder,
    mesh: Mesh,
    state: TrainState,
    *,
    base: Tree,
    read_base: Callable[[], Tree],
    checkpoints: Checkpoints,
    record: Path,
) -> tuple[Reference | None, TrainState, np.ndarray | None]:
    """The reference, the state with its moving half, and the fingerprint of the half that stays.

    A reference that followed the policy goes on from what was saved of it. One that the config names for the first
    time is loaded, and starts to move from there.

    Args:
      base: the weights under the adapter of the policy, or None without one.
      read_base: reads the weights before RL.
      record: the file of the run that its references are on record in.

    Raises:
      UserError: if it is not there, does not fit, or is not what the run was measured against before.
    """
    if not config.needs_reference():
        return None, dataclasses.replace(state, reference=None), None
    if state.reference is not None and is_recorded(record, config):
        reference: Reference | None = staying(model, base, state.trainable)
    else:
        reference = load_reference(config, model, mesh, base=base, read_base=read_base, checkpoints=checkpoints)
        moving = None
        if reference is not None and moves(config):
            reference, moving = start_moving(config, reference, state.trainable)
        state = dataclasses.replace(state, reference=moving)
    fingerprint = reference_fingerprint(reference)
    record_reference(record, config, fingerprint, int(state.step))
    return reference, state, fingerprint
