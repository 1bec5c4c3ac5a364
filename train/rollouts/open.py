"""Construction of the source that `rollout.source` names."""

from train.context import RunContext
from train.rollouts.endpoint.source import EndpointSource
from train.rollouts.episodes import EpisodeSource
from train.rollouts.jax_source import JaxSource
from train.rollouts.recorded import FileSource, open_recording
from train.rollouts.server import ServerSource
from train.rollouts.source import Source
from train.rollouts.stream import Stream
from train.rollouts.user_source import UserSource, make_user_source


def open_stream(context: RunContext, *, continued: bool = False) -> Stream:
    """Opens the stream of a run, and checks its server or files before the run starts.

    Args:
      context: the run context.
      continued: whether the run is resumed, and may overwrite its recordings.

    Raises:
      UserError: a server or file is missing or invalid, or a function of the user fails; names the field.
    """
    if context.config.rollout.record is not None:
        open_recording(context.config.rollout.record, continued=continued)
    return Stream(context, open_source(context))


def open_evaluation(context: RunContext, rollouts: Stream | None = None) -> Stream:
    """Opens the stream that `eval.source` names; `rollouts` is that of the run, if there is one."""
    if context.config.eval.source == "jax" and not context.config.runs_episodes():
        return Stream(context, JaxSource(context))
    return rollouts or Stream(context, open_source(context))


def open_source(context: RunContext) -> Source:
    """Opens the source of the config.

    Raises:
      UserError: a server or file is missing or invalid, or a function of the user fails; names the field.
    """
    section = context.config.rollout.source
    if context.config.environment is not None:
        return EpisodeSource(context)
    if section.type == "file":
        return FileSource(context, section)
    if section.type == "openai":
        return ServerSource(context, section)
    if section.type == "endpoint":
        return EndpointSource(context, section)
    if section.type == "custom":
        return UserSource(context, section.function, make_user_source(context, section))
    return JaxSource(context)
