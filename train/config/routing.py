"""The experts that the update of a mixture of experts uses."""

from typing import Literal

from train.config.types import Section


class Routing(Section):
    replay: Literal["rollout", "none"] = "rollout"
    """rollout: the experts that the sampler used, where the source tells them; none: the trainer's router chooses."""
    missing: Literal["error", "choose"] = "error"
    """Tokens without routes in a batch that has some: error, or the trainer's router chooses their experts."""
