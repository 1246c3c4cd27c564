# pyright: reportUnknownArgumentType=false, reportUnknownMemberType=false
"""Float32 weights behind parameters of a lower precision."""

from collections.abc import Generator, Iterable
from contextlib import contextmanager

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle


class Masters:
    """Float32 master weights of low-precision parameters. The parameters are cast in place.

    Forward passes and sampling use the low-precision parameters. The optimizer clips and steps the
    masters: each low-precision gradient is added to its master's float32 gradient once it is
    complete, then freed. `publish` copies the masters into the parameters, so there is no further
    copy to update. Parameters that stay float32 are their own masters.

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
        self._hooks: list[RemovableHandle] = []
        if dtype == torch.float32:
            return
        for parameter in parameters:
            self._masters[parameter] = nn.Parameter(parameter.detach().float().clone())
            parameter.data = parameter.data.to(dtype)
            self._hooks.append(parameter.register_post_accumulate_grad_hook(self._gather))

    def of(self, parameter: nn.Parameter) -> nn.Parameter:
        """The tensor that the optimizer steps in the parameter's place."""
        return self._masters.get(parameter, parameter)

    @torch.no_grad()
    def publish(self) -> None:
        """Copies the masters into the parameters in place, so that all users of the parameters see
        the new weights."""
        if self._masters:
            copy = torch._foreach_copy_  # pyright: ignore[reportPrivateUsage, reportPrivateImportUsage]
            copy(list(self._masters), list(self._masters.values()))

    @contextmanager
    def in_place(self) -> Generator[None]:
        """Within the context, parameters hold their float32 masters, for saving or loading; at its
        end they are published. The low-precision storage keeps its address, which captured graphs
        depend on.
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

    def dissolve(self) -> None:
        """Makes the parameters float32 with their masters' weights, for a policy of other settings.
        This object is of no use afterwards."""
        for hook in self._hooks:
            hook.remove()
        for parameter, master in self._masters.items():
            parameter.data = master.data
        self._masters.clear()

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
