# pyright: reportUnknownMemberType=false
"""Optimizers, learning-rate schedules, and both as tensors that a checkpoint can hold."""

import math
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn

from turnwise.config.schema import TrainConfig
from turnwise.models.masters import Masters


class NonFiniteError(RuntimeError):
    """A loss or a gradient is not finite. The weights are unchanged."""


def lr_factor(config: TrainConfig, step: int) -> float:
    """The factor on the learning rates in this step (counted from 0): warm-up, then the schedule.

    Example:
        >>> config = TrainConfig(steps=10, warmup_steps=2, schedule="linear")
        >>> [round(lr_factor(config, step), 3) for step in (0, 1, 2, 6, 9)]
        [0.5, 1.0, 1.0, 0.5, 0.125]
    """
    if step < config.warmup_steps:
        return (step + 1) / config.warmup_steps
    done = (step - config.warmup_steps) / max(config.steps - config.warmup_steps, 1)
    match config.schedule:
        case "constant":
            return 1.0
        case "linear":
            return max(1.0 - done, 0.0)
        case "cosine":
            return 0.5 * (1.0 + math.cos(math.pi * min(done, 1.0)))


class Optimizer:
    """AdamW over groups of parameters, each with a learning rate of its own, clipped together.

    Uses the fused implementation on CUDA. Steps the float32 master of a parameter if `masters` has
    one.

    Example:
        >>> weight = nn.Parameter(torch.ones(1))
        >>> optimizer = Optimizer([([weight], 0.1)], TrainConfig())
        >>> (weight * 2).sum().backward()
        >>> optimizer.clip()
        2.0
        >>> optimizer.step(1.0)
        >>> round(weight.item(), 3)
        0.9
    """

    def __init__(
        self,
        groups: Sequence[tuple[Sequence[nn.Parameter], float]],
        config: TrainConfig,
        *,
        masters: Masters | None = None,
    ) -> None:
        self._rates = [rate for parameters, rate in groups if parameters]
        self._max_norm = config.max_grad_norm
        stepped = [
            [parameter if masters is None else masters.of(parameter) for parameter in parameters]
            for parameters, _ in groups
        ]
        self.parameters = [parameter for parameters in stepped for parameter in parameters]
        """The tensors that are stepped: the parameters, or their masters."""
        self._fused = bool(self.parameters) and all(
            p.device.type == "cuda" for p in self.parameters
        )
        self._adam = torch.optim.AdamW(
            [
                {"params": parameters, "lr": rate}
                for parameters, (_, rate) in zip(stepped, groups, strict=True)
                if parameters
            ],
            betas=config.adam_betas,
            weight_decay=config.weight_decay,
            fused=True if self._fused else None,
        )

    def zero_grad(self) -> None:
        self._adam.zero_grad(set_to_none=True)

    def clip(self) -> float:
        """The gradient's norm before it was clipped.

        Raises:
            NonFiniteError: the norm is not finite; nothing was changed.
        """
        norm = float(nn.utils.clip_grad_norm_(self.parameters, self._max_norm))
        if not math.isfinite(norm):
            raise NonFiniteError(f"the gradient's norm is {norm}")
        return norm

    def step(self, factor: float) -> None:
        """One update with the learning rates times `factor`."""
        for group, rate in zip(self._adam.param_groups, self._rates, strict=True):
            group["lr"] = rate * factor
        self._adam.step()

    def tensors(self, prefix: str) -> dict[str, Tensor]:
        """Adam's state, by position of the parameter."""
        found: dict[str, Tensor] = {}
        for index, parameter in enumerate(self.parameters):
            for name, value in self._adam.state.get(parameter, {}).items():
                found[f"{prefix}.{index}.{name}"] = torch.as_tensor(value)
        return found

    def load_tensors(self, tensors: Mapping[str, Tensor], prefix: str) -> None:
        """Loads the state that `tensors` returned."""
        for index, parameter in enumerate(self.parameters):
            start = f"{prefix}.{index}."
            state = {
                name.removeprefix(start): value
                for name, value in tensors.items()
                if name.startswith(start)
            }
            if state:
                # Adam keeps the moments with the parameter, and its step count too where it is
                # fused.
                self._adam.state[parameter] = {
                    name: value.clone()
                    if name == "step" and not self._fused
                    else value.to(parameter.device).clone()
                    for name, value in state.items()
                }
