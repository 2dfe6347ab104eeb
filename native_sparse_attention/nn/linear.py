"""Linear layers whose start differs from that of `nn.Linear`.

A layer resets its own parameters alone, in `reset_parameters`, which the constructor calls too. So a model made on the
meta device equals a fresh one after `to_empty` and a loop that calls `reset_parameters` of each of its modules.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Literal

import torch
from torch import Tensor, nn


@torch.no_grad()
def set_values(parameter: Tensor, values: Tensor) -> None:
    """Copy values into a parameter of the same shape; of a sharded one (DTensor), into the shard of this rank."""
    if hasattr(parameter, 'device_mesh'):
        from torch.distributed.tensor import distribute_tensor

        values = distribute_tensor(values.to(parameter.device), parameter.device_mesh, parameter.placements)  # type: ignore[attr-defined]
    parameter.copy_(values)


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
        shape = self.out_features, self.in_features
        set_values(self.weight, torch.zeros(shape) if self.start == 'zeros' else torch.eye(*shape))
        if self.bias_start is not None:
            set_values(self.bias, torch.tensor(self.bias_start))


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
        out = torch.einsum('bhci,hio->bhco', blocks.flatten(3), self.weight.flatten(1, -2))
        return out if self.bias is None else out + self.bias

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
