"""Optimizers, learning-rate schedules, and both as tensors that a checkpoint can hold."""

import math
from collections.abc import Generator, Iterable, Mapping, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from turnwise.config.schema import TrainConfig


class NonFiniteError(RuntimeError):
    """A loss or a gradient is not a number. The weights were not touched."""


def lr_factor(config: TrainConfig, step: int) -> float:
    """What the learning rates are multiplied with in this step (counted from 0): warm-up, then the schedule.

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


class Masters:
    """The float32 weights behind parameters of a lower precision, which are cast to it here, in place.

    The networks run, and the generator samples, with the low-precision parameters themselves. What the optimizer
    clips and steps are the masters: a low-precision gradient is added to its master's float32 gradient as soon as it
    is whole, and freed. `publish` writes the masters into the parameters, so that no other copy of the weights has
    to follow. Parameters that are float32 already, and stay so, are their own masters.

    Example:
        >>> weight = nn.Parameter(torch.tensor([1.0 + 2**-12]))
        >>> masters = Masters([weight], torch.bfloat16)
        >>> weight.dtype, masters.of(weight).item() == 1.0 + 2**-12
        (torch.bfloat16, True)
        >>> weight.square().sum().backward()
        >>> weight.grad is None, masters.of(weight).grad
        (True, tensor([2.]))
    """

    def __init__(self, parameters: Iterable[nn.Parameter], dtype: torch.dtype) -> None:
        self._masters: dict[nn.Parameter, nn.Parameter] = {}
        if dtype == torch.float32:
            return
        for parameter in parameters:
            self._masters[parameter] = nn.Parameter(parameter.detach().float().clone())
            parameter.data = parameter.data.to(dtype)
            parameter.register_post_accumulate_grad_hook(self._gather)

    def of(self, parameter: nn.Parameter) -> nn.Parameter:
        """What the optimizer steps in the parameter's place."""
        return self._masters.get(parameter, parameter)

    @torch.no_grad()
    def publish(self) -> None:
        """Writes the masters into the parameters, in place: whoever holds those sees the new weights."""
        if self._masters:
            copy = torch._foreach_copy_  # pyright: ignore[reportPrivateUsage, reportPrivateImportUsage]
            copy(list(self._masters), list(self._masters.values()))

    @contextmanager
    def in_place(self) -> Generator[None]:
        """The parameters are their float32 masters, to be saved or loaded; afterwards what they came to is published.

        The low-precision storage stays where it was: captured graphs hold on to its address.
        """
        low = {parameter: parameter.data for parameter in self._masters}
        for parameter, master in self._masters.items():
            parameter.data = master.data
        try:
            yield
        finally:
            for parameter, data in low.items():
                parameter.data = data
            self.publish()

    @torch.no_grad()
    def _gather(self, parameter: Tensor) -> None:
        assert isinstance(parameter, nn.Parameter)
        assert parameter.grad is not None
        master = self._masters[parameter]
        if master.grad is None:
            master.grad = parameter.grad.float()
        else:
            master.grad += parameter.grad
        parameter.grad = None


class Optimizer:
    """AdamW over groups of parameters, each with a learning rate of its own, clipped together.

    On CUDA it is the fused one. Where `masters` holds float32 weights for a parameter, those are what is stepped.

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
        """What is stepped: the parameters, or their masters."""
        self._fused = bool(self.parameters) and all(p.device.type == "cuda" for p in self.parameters)
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
        """Takes up the state that `tensors` gave."""
        for index, parameter in enumerate(self.parameters):
            start = f"{prefix}.{index}."
            state = {name.removeprefix(start): value for name, value in tensors.items() if name.startswith(start)}
            if state:
                # Adam keeps the moments with the parameter, and its step count too where it is fused.
                self._adam.state[parameter] = {
                    name: value.clone() if name == "step" and not self._fused else value.to(parameter.device).clone()
                    for name, value in state.items()
                }
