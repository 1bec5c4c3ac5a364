"""From `rollout.source` of the config to a source."""

from train.rollouts.jax_source import JaxSource
from train.rollouts.recorded import FileSource, open_recording
from train.rollouts.server import ServerSource
from train.rollouts.source import Source
from train.run.setting import Setting


def open_source(setting: Setting, *, continued: bool = False) -> Source:
    """The source of the config, with everything checked that can be before a run starts.

    Args:
      continued: whether a run is resumed, which may write its recordings again.

    Raises:
      UserError: naming the field: a server that does not answer as it must, a file that is not as it must be.
    """
    section, record = setting.config.rollout.source, setting.config.rollout.record
    if record is not None:
        open_recording(record, continued=continued)
    if section.type == "file":
        return FileSource(setting, section)
    if section.type == "openai":
        return ServerSource(setting, section)
    return JaxSource(setting)
