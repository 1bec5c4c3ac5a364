"""From `rollout.source` of the config to a source."""

from train.rollouts.context import RunContext
from train.rollouts.jax_source import JaxSource
from train.rollouts.recorded import FileSource, open_recording
from train.rollouts.server import ServerSource
from train.rollouts.source import Source


def open_source(context: RunContext, *, continued: bool = False) -> Source:
    """The source of the config, with everything checked that can be before a run starts.

    Args:
      continued: whether a run is resumed, which may write its recordings again.

    Raises:
      UserError: naming the field: a server that does not answer as it must, a file that is not as it must be.
    """
    section, record = context.config.rollout.source, context.config.rollout.record
    if record is not None:
        open_recording(record, continued=continued)
    if section.type == "file":
        return FileSource(context, section)
    if section.type == "openai":
        return ServerSource(context, section)
    return JaxSource(context)
