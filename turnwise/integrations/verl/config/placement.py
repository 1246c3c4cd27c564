"""Where a run on verl happens."""

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True, slots=True)
class Placement:
    """Nodes, devices of each, and what they are.

    Example:
        >>> Placement(nodes=2, gpus=8, device="cuda").ranks
        16
    """

    nodes: int = 1
    gpus: int = 1
    """Per node; without an accelerator, ranks per node."""
    device: str = "cpu"

    @property
    def ranks(self) -> int:
        return self.nodes * self.gpus
