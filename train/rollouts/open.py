"""Construction of the source that `rollout.source` names."""

from train.config.user_functions import make_with
from train.context import RunContext
from train.process.waiting import waiting_for
from train.rollouts.jax_source import JaxSource
from train.rollouts.recorded import FileSource, open_recording
from train.rollouts.server import AheadSource, ServerSource
from train.rollouts.source import Source
from train.rollouts.user_source import UserSource


def open_source(context: RunContext, *, continued: bool = False) -> Source:
    """Opens the source of the config, and checks its server or files before the run starts.

    Args:
      context: the run context.
      continued: whether the run is resumed, and may overwrite its recordings.

    Raises:
      UserError: a server or file is missing or invalid, or a function of the user fails; names the field.
    """
    section, record = context.config.rollout.source, context.config.rollout.record
    if record is not None:
        open_recording(record, continued=continued)
    if section.type == "file":
        return FileSource(context, section)
    if section.type == "openai":
        server = ServerSource(context, section)
        return AheadSource(context, server) if context.config.rollout.ahead else server
    if section.type == "custom":
        with waiting_for(f"rollout.source: {section.function}"):
            made = make_with("rollout.source", section.function, Source, context, **section.arguments)
        return UserSource(context, section.function, made)
    return JaxSource(context)
