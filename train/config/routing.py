"""The experts that the update of a mixture of experts uses, and what trains its routers."""

from typing import Literal, TypeAlias

from train.config.types import Fraction, NonNegative, Section

Replay: TypeAlias = Literal["rollout", "old_policy", "none"]


class Routing(Section):
    replay: Replay = "rollout"
    """Experts of an update: rollout: of the sampler; old_policy: of scoring; none: the trainer's router chooses."""
    missing: Literal["error", "choose"] = "error"
    """Tokens without routes in a batch that has some: error, or the trainer's router chooses their experts."""
    threshold: Fraction = 0.0
    """Use a replayed expert if its probability is at least this share of the router's least probable choice; 0: all."""
    verify: bool = False
    """End a run whose update used other experts than the recorded ones, or whose routes are shifted by one token."""
    balance_coef: NonNegative = 0.0
    """Coefficient of the loss that balances the load of the experts."""
    balance_over: Literal["model", "layer"] = "model"
    """Loads that are balanced: model: of all layers together, as transformers does; layer: of each, then their mean."""
    z_coef: NonNegative = 0.0
    """Coefficient of the z-loss, the mean square of the log of the sum of exp of a router's logits."""
    bias_update_rate: Fraction = 0.0
    """Step of a bias of each expert, after each update, towards equal loads; added for the choice alone. 0: none."""
    freeze: bool = False
    """Leave the routers as they are in RL; with lora leave `gate` out of lora.targets instead."""
