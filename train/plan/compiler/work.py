"""The operations and bytes of a program."""

import dataclasses


@dataclasses.dataclass(frozen=True)
class Work:
    """The work of one device in one run of a program.

    Attributes:
      flops: operations of its matmuls.
      memory: bytes read from and written to its memory.
      links: bytes sent within its slice or host.
      network: bytes sent to other slices or hosts.
    """

    flops: float = 0.0
    memory: float = 0.0
    links: float = 0.0
    network: float = 0.0

    def __mul__(self, times: float) -> "Work":
        """Repeats the work."""
        return Work(*(times * value for value in dataclasses.astuple(self)))
