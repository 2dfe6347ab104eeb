"""Context parallelism: the tokens of a sequence are divided over the ranks of a mesh."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule

from native_sparse_attention.core.checks import check_integers, shown
from native_sparse_attention.distributed.context_attention import attend_divided, compress_divided
from native_sparse_attention.distributed.local import with_behaviour
from native_sparse_attention.distributed.mesh import check_mesh, check_not_staged, check_whole_rows
from native_sparse_attention.distributed.sequence import DividedSequence, exchange_objects, fetch, run_uncompiled
from native_sparse_attention.nn.attention import SparseAttention
from native_sparse_attention.nn.transformer import IGNORED_LABEL, Transformer, continues, num_labels


def apply_cp(model: Transformer, mesh: DeviceMesh) -> Transformer:
    """Divide the sequences of a model over the ranks of a mesh, in place; return the model.

    Each rank calls the model with its shard of the tokens, `[B, T]` of any length, also 0; the shards follow each other
    in the order of the ranks. It returns the logits of the shard. Losses are those of the whole sequence, equal on all
    ranks. The mean over the ranks of the gradients of the loss is its gradient, as `apply_fsdp` and
    `DistributedDataParallel` over these ranks compute it. cu_seqlens are borders in the whole sequence, the same on all
    ranks.

    A call with a cache, so also `prefill` and `generate`, is not divided: it takes whole rows, and the rank computes
    them by itself.

    All ranks call the model and its backward pass equally often. Before tokens are exchanged, the ranks compare their
    arguments; an error of one is raised on all. Apply it after `apply_tp`, before checkpointing, compilation and
    `apply_fsdp`. The ranks have the same weights; nothing is broadcast.

    Args:
        model: `Transformer` with sparse attention.
        mesh: of one dimension.

    Raises:
        ValueError: another model or mesh, or a model that is sharded or divided by this function already. In a forward:
            arguments that differ between ranks, and without a cache mask, return_cache, last_only or return_block_loss.
    """
    check_mesh(mesh, (1,))
    if not isinstance(model, Transformer):
        raise ValueError(f'model is {shown(type(model).__name__)}, but must be a Transformer')
    check_not_staged(model, 'apply_cp')
    check_whole_rows(model, 'apply_cp')
    if not model.use_sparse_attn:
        raise ValueError('use_sparse_attn of the model is False, but must be True: dense attention is not divided')
    if isinstance(model, _Model):
        raise ValueError('model is divided already, but apply_cp must be called once')
    if any(isinstance(module, FSDPModule) for module in model.modules()):
        raise ValueError('model is sharded already, but apply_cp comes first, before apply_fsdp')
    for block in model.blocks:
        if not isinstance(block.attention, SparseAttention):
            kind = type(block.attention).__name__
            raise ValueError(f'attention of a block is a {kind}, but must be a SparseAttention')
    for block in model.blocks:
        with_behaviour(block.attention, _Attention)
    with_behaviour(model, _Model)
    object.__setattr__(model, 'context_mesh', mesh)
    return model


@dataclass(eq=False)
class _Call:
    """A forward of the model, in the place of cu_seqlens.

    options: of the forward and the mode, which the ranks compare. sequence: None until the ranks have agreed on it.
    is_exchanged: whether the other ranks know of this call.
    """

    group: Any
    cu_seqlens: Tensor | None
    options: dict[str, Any]
    sequence: DividedSequence | None = None
    is_exchanged: bool = False

    def agreed(self, ids: Tensor) -> DividedSequence:
        """Return the sequence of which ids `[B, T]` is the shard of this rank."""
        if self.sequence is None:
            if self.cu_seqlens is not None:
                check_integers('cu_seqlens', self.cu_seqlens, None)
                if len(ids) != 1:
                    raise ValueError(f'ids has batch size {len(ids)}, but must have 1 where cu_seqlens is given')
            items = self.options.get('num_items_in_batch')
            described: dict[str, Any] = {name: shown(value) for name, value in self.options.items()}
            described['num_items_in_batch'] = items.tolist() if isinstance(items, Tensor) else items
            described |= {'the batch size of ids': len(ids), 'torch.is_grad_enabled()': torch.is_grad_enabled()}
            self.is_exchanged = True
            self.sequence = DividedSequence.agree(self.group, ids.shape[1], self.cu_seqlens, described)
        return self.sequence


class _Model(Transformer):
    """A `Transformer` with the shard of this rank of the tokens."""

    context_mesh: DeviceMesh

    @run_uncompiled
    def forward(
        self, ids: Tensor, return_loss: bool = False, *args: Any, cu_seqlens: Any = None, **options: Any
    ) -> Any:
        given = {**dict(zip(('cache', 'return_cache'), args, strict=False)), **options, 'return_loss': return_loss}
        if given.get('cache') is not None:
            return super().forward(ids, return_loss, *args, cu_seqlens=cu_seqlens, **options)
        call = _Call(self.context_mesh.get_group(), cu_seqlens, {**given, 'training': self.training})
        try:
            for name in ('mask', 'return_cache', 'last_only', 'return_block_loss'):
                if given.get(name) is not None and given[name] is not False:
                    raise ValueError(f'{name} is given, but must not be where a sequence is divided over ranks')
            return super().forward(ids, return_loss, cu_seqlens=call, **options)  # type: ignore[arg-type]
        except Exception as error:
            if not call.is_exchanged:
                exchange_objects(call.group, error)
            raise

    def _embed(self, ids: Tensor, mask: Any, cu_seqlens: Any, backend: str | None, block_losses: Any) -> Tensor:
        sequence: Any = cu_seqlens.agreed(ids)
        return sequence.collect(super()._embed(sequence.spread(ids), mask, sequence, backend, block_losses))

    def _loss(self, ids: Tensor, mask: Any, cu_seqlens: Any, backend: str | None, block_losses: Any) -> Tensor:
        targets = self._targets(ids, mask, cu_seqlens)
        call = replace(cu_seqlens, sequence=cu_seqlens.sequence.without_last())
        embedded = self._embed(ids[:, : targets.shape[1]], mask, call, backend, block_losses)
        return self._mean_loss(embedded, targets)

    def _targets(self, labels: Tensor, mask: Any, cu_seqlens: Any) -> Tensor:
        """Return the label after each token of this rank but the last of the sequence."""
        sequence, total = cu_seqlens.agreed(labels), cu_seqlens.sequence.total
        if total < 2:
            raise ValueError(f'ids has {total} tokens per row, but a loss needs at least 2')
        wanted = tuple((range(min(s.start + 1, total), min(s.stop + 1, total)),) for (s,) in sequence.shards)
        targets, (place,) = fetch(labels, sequence.group, sequence.shards, wanted), wanted[sequence.rank]
        if sequence.cu_seqlens is None:
            return targets
        has_next = continues(sequence.cu_seqlens, total)[place.start - 1 : place.stop - 1]
        return targets.masked_fill(~has_next, IGNORED_LABEL)

    def _mean(self, total: Tensor, targets: Tensor, count: Tensor | int | None = None) -> Tensor:
        """Return the mean over the whole sequence, with the gradient of this rank's share of it times the ranks."""
        sums = torch.stack([total.detach().double(), num_labels(targets).double()])
        dist.all_reduce(sums, group=self.context_mesh.get_group())
        count = sums[1].clamp(min=1) if count is None else count
        share = (total * self.context_mesh.size() / count).to(total.dtype)
        return share - share.detach() + (sums[0] / count).to(total.dtype)  # in this order equal on all ranks


class _Attention(SparseAttention):
    """A `SparseAttention` with the tokens that this rank holds; cu_seqlens is a `DividedSequence`."""

    @run_uncompiled
    def forward(self, *args: Any, **options: Any) -> Any:
        return super().forward(*args, **options)

    def _check_call(self, x: Tensor, mask: Any, cu_seqlens: Any, cache: Any, return_cache: bool) -> bool:
        if isinstance(cu_seqlens, DividedSequence):
            cu_seqlens = None
        elif cache is None:
            raise ValueError('attention is called without its model, but must not be after apply_cp')
        return super()._check_call(x, mask, cu_seqlens, cache, return_cache)

    def _with_positions(self, x: Tensor, cu_seqlens: Any) -> tuple[Tensor, Tensor]:
        parts, borders = cu_seqlens.held[cu_seqlens.rank], cu_seqlens.cu_seqlens
        index = torch.cat([torch.arange(part.start, part.stop, device=x.device) for part in (range(0), *parts)])
        if borders is None:
            return x, index[None]
        sequence = torch.searchsorted(borders[1:].contiguous(), index, right=True)
        is_covered = index < borders[-1]
        position = (index - borders[sequence.clamp(max=len(borders) - 2)]).masked_fill(~is_covered, 0)
        return torch.where(is_covered[:, None], x, 0), position[None]

    def _compress(self, new: Any, cu_seqlens: Any, trains_scores: bool) -> tuple[Any, Any]:
        if self.k_compress is None:
            return None, None
        inherited = super()._compress

        def compress(tokens: Any, borders: Tensor | None) -> Any:
            raw_k, raw_v = (*tokens, None)[:2]
            return inherited(new._replace(raw_k=raw_k, raw_v=raw_v), borders, trains_scores)

        tokens = (new.raw_k, new.raw_v)[: 1 if self.v_compress is None else 2]
        sizes = (self.compress_block_size, self.compress_block_sliding_stride)
        return compress_divided(compress, cu_seqlens, cu_seqlens.held, sizes, tokens)

    def _nsa(self, q: Tensor, *tensors: Any, cu_seqlens: Any = None, **settings: Any) -> Tensor:
        # Without projections of its own, the window branch reads k and v, which are gathered once.
        unused = ('q_offset', 'seqlens_k', *(() if self.independent_branch_kv else ('k_window', 'v_window')))
        settings = {name: value for name, value in settings.items() if name not in unused}
        sizes = (self.compress_block_size, self.compress_block_sliding_stride) if self.causal else None
        inherited = super()._nsa
        return attend_divided(inherited, cu_seqlens, cu_seqlens.held, q, *tensors, causal_sizes=sizes, **settings)
