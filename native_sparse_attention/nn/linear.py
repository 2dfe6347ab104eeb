"""Linear layers whose start differs from that of `nn.Linear`.

A layer resets its own parameters alone, in `reset_parameters`, which the constructor calls too. So a model made on the
meta device equals a fresh one after `to_empty` and a loop that calls `reset_parameters` of each of its modules.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn


def as_divided(parameter: Tensor, values: Tensor) -> Tensor:
    """Return values of the same shape as a parameter; for a sharded one (DTensor), sharded like it."""
    if not hasattr(parameter, 'device_mesh') or hasattr(values, 'device_mesh'):
        return values
    from torch.distributed.tensor import distribute_tensor

    return distribute_tensor(values.to(parameter.device), parameter.device_mesh, parameter.placements)  # type: ignore[attr-defined]


@torch.no_grad()
def set_values(parameter: Tensor, values: Tensor) -> None:
    """Copy values into a parameter of the same shape; of a sharded one (DTensor), into the shard of this rank."""
    parameter.copy_(as_divided(parameter, values))


class FixedStartLinear(nn.Linear):
    """A linear layer that starts from fixed values.

    start: 'zeros' or 'identity', the weight. bias_start: `[out_features]`, or None for a layer without a bias.
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        start: Literal['zeros', 'identity'] = 'zeros',
        bias_start: Sequence[float] | None = None,
    ) -> None:
        # Before the constructor of nn.Linear, which calls reset_parameters.
        self.start, self.bias_start = start, None if bias_start is None else tuple(bias_start)
        super().__init__(in_features, out_features, bias=bias_start is not None)

    def reset_parameters(self) -> None:
        shape, device = (self.out_features, self.in_features), self.weight.device
        start = torch.zeros(shape, device=device) if self.start == 'zeros' else torch.eye(*shape, device=device)
        set_values(self.weight, start)
        if self.bias_start is not None:
            set_values(self.bias, torch.tensor(self.bias_start, device=device))


class HeadLinear(nn.Module):
    """A linear layer of the flattened block with weights of its own for every head.

    Maps `[B, H, C, *features]` to `[B, H, C, out_features]`. weight: `[H, *features, out_features]`; bias:
    `[1, H, 1, out_features]` or None. Both start from the uniform distributions of `einops.EinMix`.
    """

    def __init__(self, heads: int, features: Sequence[int], out_features: int, bias: bool = True) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(heads, *features, out_features))
        self.bias = nn.Parameter(torch.empty(1, heads, 1, out_features)) if bias else None
        self.reset_parameters()

    def reset_parameters(self) -> None:
        fan_in = self.weight[0, ..., 0].numel()
        nn.init.uniform_(self.weight, -math.sqrt(3 / fan_in), math.sqrt(3 / fan_in))
        if self.bias is not None:
            nn.init.uniform_(self.bias, -math.sqrt(1 / fan_in), math.sqrt(1 / fan_in))

    def forward(self, blocks: Tensor) -> Tensor:
        weight, bias = self.weight, self.bias
        if weight.dim() > 3:
            blocks, weight = blocks.flatten(3), weight.flatten(1, -2)
        out = torch.einsum('bhci,hio->bhco', blocks, weight)
        return out if bias is None else out + bias

    def extra_repr(self) -> str:
        return f'weight={list(self.weight.shape)}, bias={self.bias is not None}'


class BranchLinear(nn.Linear):
    """A projection to queries and one pair of keys and values per branch, which start equal.

    sizes: output features of the queries, the keys and the values. Random numbers are drawn as for one pair.
    """

    def __init__(self, in_features: int, sizes: Sequence[int], branches: int) -> None:
        # Before the constructor of nn.Linear, which calls reset_parameters.
        self.sizes, self.branches = tuple(sizes), branches
        super().__init__(in_features, sizes[0] + branches * sum(sizes[1:]), bias=False)

    def reset_parameters(self) -> None:
        drawn = self.weight.new_empty(sum(self.sizes), self.in_features)
        if hasattr(drawn, 'to_local'):
            drawn = torch.empty(drawn.shape, dtype=drawn.dtype, device=drawn.device)
        nn.init.kaiming_uniform_(drawn, a=math.sqrt(5))  # as nn.Linear draws
        queries, pair = drawn.tensor_split([self.sizes[0]])
        set_values(self.weight, torch.cat([queries, *[pair] * self.branches]))


class SplitLinear(nn.Module):
    """The projection to queries, keys and values with a weight for each, so that each can be divided by heads.

    sizes: output features of the queries, then of keys and values of each branch. A call returns one tensor for each.
    State dicts of a linear layer with all rows in one weight load into it, and its state dicts load into an attention
    layer that has such a weight.
    """

    def __init__(self, in_features: int, sizes: Sequence[int], **kind: Any) -> None:
        super().__init__()
        self.in_features, self.names = in_features, projection_names(sizes)
        for name, size in zip(self.names, sizes, strict=True):
            self.register_parameter(name, nn.Parameter(torch.empty(size, in_features, **kind)))
        self.register_load_state_dict_pre_hook(_split_loaded)

    @classmethod
    def of(cls, linear: nn.Linear, sizes: Sequence[int]) -> SplitLinear:
        """Return the layer with the weights of one that returns all features in one tensor."""
        weight = linear.weight
        split = cls(linear.in_features, sizes, dtype=weight.dtype, device=weight.device)
        for parameter, part in zip(split.parameters(), weight.detach().split(list(sizes)), strict=True):
            parameter.data.copy_(part)
            parameter.requires_grad_(weight.requires_grad)
        return split.train(linear.training)

    @property
    def weight(self) -> Tensor:
        """The weight of the queries, for its dtype and device."""
        return getattr(self, self.names[0])

    def reset_parameters(self) -> None:
        """As `nn.Linear` and `BranchLinear`: keys and values of all branches start equal."""
        first = [self.get_parameter(name) for name in self.names[:3]]
        for parameter in first:
            nn.init.kaiming_uniform_(parameter, a=math.sqrt(5))
        with torch.no_grad():
            for index, name in enumerate(self.names[3:]):
                self.get_parameter(name).copy_(first[1 + index % 2])

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        return tuple(F.linear(x, getattr(self, name)) for name in self.names)


def projection_names(sizes: Sequence[int]) -> tuple[str, ...]:
    """Return the names of the weights of a `SplitLinear`."""
    branches = ('',) if len(sizes) == 3 else ('_compressed', '_selected', '_window')
    return ('q', *(f'{name}{branch}' for branch in branches for name in 'kv'))


def _split_loaded(linear: SplitLinear, state_dict: dict[str, Any], prefix: str, *_: Any) -> None:
    fused = state_dict.pop(prefix + 'weight', None)
    if fused is not None:
        parameters = dict(linear.named_parameters())
        parts = fused.split([len(parameter) for parameter in parameters.values()])
        for (name, parameter), part in zip(parameters.items(), parts, strict=True):
            state_dict[prefix + name] = as_divided(parameter, part)


def join_loaded(sizes: Sequence[int], state_dict: dict[str, Any], prefix: str) -> None:
    """Join the weights of a `SplitLinear` in a state dict to the one of a linear layer."""
    names = [prefix + name for name in projection_names(sizes)]
    if all(name in state_dict for name in names):
        state_dict[prefix + 'weight'] = torch.cat([state_dict.pop(name) for name in names])
