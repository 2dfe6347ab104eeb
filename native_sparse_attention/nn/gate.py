"""The gate of the branches: a map from the normalised input to the gate logits of each head.

There are three gates per head: compressed, selected, window. With merged attention there is one, of the compressed
branch, and with `output_gate` a second one, of the whole output.
"""

from __future__ import annotations

import torch
from torch import nn

from native_sparse_attention.core.checks import shown
from native_sparse_attention.nn.linear import FixedStartLinear

# Logits at the start. The window gate is open and the others nearly shut, as local patterns are learned first.
GATE_START = (-2.0, -2.0, 2.0)
# Logit of the compressed output beside merged attention.
MERGED_GATE_START = (-2.0,)
# Logit of a whole output: open.
OUTPUT_GATE_START = 2.0


def make_gate(dim: int, heads: int, start: tuple[float, ...] = GATE_START) -> FixedStartLinear:
    """Return a gate `[..., dim]` → `[..., heads * len(start)]` whose logits are `start` for every input at first.

    Args:
        dim: features of the input.
        heads: HQ, number of query heads.
        start: the logits of a head at first, one per gated branch.
    """
    return FixedStartLinear(dim, heads * len(start), bias_start=start * heads)


def make_output_gate(dim: int, heads: int) -> FixedStartLinear:
    """Return a gate of a whole attention output, `[..., dim]` → `[..., heads]`, that starts at OUTPUT_GATE_START."""
    return make_gate(dim, heads, (OUTPUT_GATE_START,))


@torch.no_grad()
def check_gate(gate: nn.Module, dim: int, heads: int, num_gates: int = 3) -> None:
    """Raise ValueError unless the gate maps `[..., dim]` to `[..., heads * num_gates]`; its modes stay as they are."""
    expected = (1, 1, num_gates * heads)
    if not isinstance(gate, nn.Module):
        raise ValueError(f'strategy_combine_mlp is {shown(gate)}, but must be a module or None')
    default = torch.empty((), device=torch.get_default_device())
    weight = next((p for p in gate.parameters() if p.is_floating_point()), default)
    was_training = [module for module in gate.modules() if module.training]
    gate.eval()
    try:
        shape = tuple(gate(torch.zeros(1, 1, dim, dtype=weight.dtype, device=weight.device)).shape)
    except Exception as error:
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise ValueError(f'strategy_combine_mlp must map {(1, 1, dim)} to {expected}, but: {reason}') from error
    finally:
        for module in was_training:
            module.training = True
    if shape != expected:
        raise ValueError(
            f'strategy_combine_mlp maps {(1, 1, dim)} to {shape}, but must map it to {expected}: {num_gates} per head'
        )
