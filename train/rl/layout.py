"""The layout of batch rows: where prompts end, and which rows share one."""

import dataclasses
import math

from train.config.schema import Config


@dataclasses.dataclass(frozen=True)
class Layout:
    """How rows `[prompt, left-padded to P | completion, right-padded]` are arranged. Static in compiled programs.

    Attributes:
      prompt_length: P, the first column that may be scored; at least 1, as column 0 has no prediction.
      group: consecutive rows that share one prompt, which goes through the layers once for all of them.
    """

    prompt_length: int = 1
    group: int = 1

    @classmethod
    def of(cls, config: Config) -> "Layout":
        """Returns the layout of a rollout batch: as many rows share a prompt as a device has in one micro-batch."""
        if not config.optim.share_prompts:
            return cls(config.data.max_prompt_length)
        optim, mesh = config.optim, config.mesh
        parts = optim.updates_per_batch * optim.micro_batches * mesh.data * mesh.fsdp
        group = math.gcd(config.rollout.samples_per_prompt, config.rows_per_batch() // parts)
        return cls(config.data.max_prompt_length, group)


ROWS = Layout()
"""Rows of their own, scored from column 1 on."""
