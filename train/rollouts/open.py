"""From `rollout.source` of the config to a source."""

from train.rollouts.jax_source import JaxSource
from train.rollouts.server import ServerSource
from train.rollouts.source import Source
from train.setting import Setting


def open_source(setting: Setting, *, continued: bool = False) -> Source:
    """The source of the config, with everything checked that can be before a run starts.

    Args:
      continued: whether a run is resumed, which may write its recordings again.

    Raises:
      UserError: naming the field: a server that does not answer as it must, a file that is not as it must be.
    """
    section = setting.config.rollout.source
    if section.type == "openai":
        return ServerSource(setting, section)
    return JaxSource(setting)
