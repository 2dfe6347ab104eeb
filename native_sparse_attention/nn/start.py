"""Initial weights of a model: order of random draws, weights shared by dense and sparse models, tied weights."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor, nn

from native_sparse_attention.nn.attention import SparseAttention
from native_sparse_attention.nn.dense import DenseAttention


def reset_networks(attentions: Iterable[SparseAttention]) -> None:
    """Reset the networks φ of the layers, in the order of `StartedModel.modules`."""
    for attention in attentions:
        for network in (attention.k_compress, attention.v_compress):
            for module in () if network is None else network.modules():
                if hasattr(module, 'reset_parameters'):
                    module.reset_parameters()


def without_draws() -> AbstractContextManager[None]:
    """Restore the random generators of the CPU and of the default device at the end."""
    device = torch.get_default_device()
    if device.type in ('cpu', 'meta'):
        return torch.random.fork_rng([])
    return torch.random.fork_rng([device], device_type=device.type)


@torch.no_grad()
def start_from(attention: SparseAttention, start: DenseAttention) -> None:
    """Copy the projections of start; every pair of keys and values of `independent_branch_kv` copies its pair."""
    attention.combine_heads.weight.copy_(start.combine_heads.weight)
    queries, keys_values = start.to_qkv.weight.tensor_split([start.heads * start.dim_head])
    num_pairs = (len(attention.to_qkv.weight) - len(queries)) // len(keys_values)
    attention.to_qkv.weight.copy_(torch.cat([queries, *[keys_values] * num_pairs]))


class StartedModel(nn.Module):
    """Base of a model with the order of its random draws and the tie of its head.

    `token_emb` and `to_logits` may share their weight. `to_empty` and `load_state_dict(assign=True)` give each module a
    parameter of its own; the two are tied again where they were tied before.
    """

    token_emb: nn.Embedding
    to_logits: nn.Linear

    def __init__(self) -> None:
        super().__init__()
        self._loading: tuple[Tensor, ...] = ()  # the shared weight, while a state dict is loaded
        self.register_load_state_dict_pre_hook(_before_loading)
        self.register_load_state_dict_post_hook(_tie_loaded)

    @property
    def is_tied(self) -> bool:
        first, second = own_weight(self.token_emb), own_weight(self.to_logits)
        return first is not None and first is second

    def modules(self) -> Iterator[nn.Module]:
        """Yield all modules, the networks φ and gates of sparse attention last.

        A loop that calls `reset_parameters` of each module that has it, as after `to_empty`, then gives dense and
        sparse models the same weights, as the constructor does.
        """
        modules = [*super().modules()]
        last = dict.fromkeys(m for a in modules if isinstance(a, SparseAttention) for m in a.networks())
        yield from (module for module in modules if module not in last)
        yield from last

    def _apply(self, fn: Any, recurse: bool = True) -> Any:
        tied = self.is_tied
        super()._apply(fn, recurse)
        if tied:
            self.token_emb.weight = own_weight(self.to_logits)  # type: ignore[assignment]
        return self


def own_weight(module: nn.Module) -> Any:
    """Return the parameter `weight` of a module, or None. The attribute may be a part of it (tensor parallelism)."""
    return dict(module.named_parameters(recurse=False)).get('weight')


def _before_loading(model: StartedModel, *_: Any) -> None:
    model._loading = (own_weight(model.to_logits),) if model.is_tied else ()


def _tie_loaded(model: StartedModel, _: Any) -> None:
    shared, model._loading = model._loading, ()
    if not shared or model.is_tied:
        return
    # A state dict may hold the shared weight under one name alone.
    if own_weight(model.to_logits) is shared[0]:
        model.to_logits.weight = own_weight(model.token_emb)
    else:
        model.token_emb.weight = own_weight(model.to_logits)
