"""Linear layers and means of overlapping blocks, computed from chunks of tokens without laying the blocks out.

A chunk has d tokens, a block l / d chunks. A linear layer of the block is a sum over its chunks: each chunk is
multiplied by the columns of the weight that belong to its slot in the block, and the products of consecutive chunks are
added. Keys and values are K kinds of blocks, computed together where their networks are of the same form.

Legend: that of `networks`, with K kinds and N chunks.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from native_sparse_attention.core import geometry, private
from native_sparse_attention.core.projection import projection_dtype


class OverlappingBlocks(NamedTuple):
    """Blocks given by their chunks.

    Block number i has the chunks i, ..., i + l / d - 1, and `positions` is added to its tokens.

    chunks: `[B, N, d, H, D]` of each kind, any strides. positions: `[K, H, l, D]`. first_chunks: int64 `[C]`, the first
    chunk of each block of packed sequences; None: all N - l / d + 1 runs of chunks are blocks.
    """

    chunks: Sequence[Tensor]
    positions: Tensor
    first_chunks: Tensor | None = None

    @property
    def num_slots(self) -> int:
        """Chunks of a block, l / d."""
        return self.positions.shape[2] // self.chunks[0].shape[2]

    @property
    def num_runs(self) -> int:
        """Runs of l / d chunks, those across borders of packed sequences included."""
        return self.chunks[0].shape[1] - self.num_slots + 1

    @property
    def num_blocks(self) -> int:
        """C."""
        return self.num_runs if self.first_chunks is None else len(self.first_chunks)

    def pick_blocks(self, of_runs: Tensor) -> Tensor:
        """Return the results `[K, C, ...]` of the blocks from those of all runs, `[K, num_runs, ...]`."""
        return of_runs if self.first_chunks is None else of_runs[:, self.first_chunks]

    def linear(self, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        """Return a linear layer of the flattened blocks, `[K, C * B * H, O]`, or per head `[K * H, C * B, O]`.

        weight, bias: as in `nn.Linear`, `[K, O, l * D]` and `[K, O]`, or per head `[K * H, O, l * D]` and `[K * H, O]`.
        """
        kinds, batch = len(self.chunks), len(self.chunks[0])
        if len(weight) == kinds:
            rows = torch.stack([c.permute(1, 0, 3, 2, 4) for c in self.chunks]).flatten(4)  # [K, N, B, H, d * D]
            positions = self.positions.flatten(2)
        else:
            rows = torch.stack([c.permute(3, 1, 0, 2, 4) for c in self.chunks])
            rows = rows.flatten(4).flatten(0, 1)  # [K * H, N, B, d * D]
            positions = self.positions.flatten(2).flatten(0, 1)[:, None]
        # One cast here; autocast would cast the weight of each slot.
        weight, bias = weight.to(projection_dtype(weight)), None if bias is None else bias.to(projection_dtype(bias))
        rows = rows.to(projection_dtype(rows))
        # The weight is the first factor, so that its gradient has its layout: [K, O, H] or [K * H, O, 1].
        columns = positions.to(rows.dtype).mT
        constant = torch.bmm(weight, columns) if bias is None else torch.baddbmm(bias[..., None], weight, columns)
        out = _add_products(constant.mT, rows.flatten(1, -2), weight, self.num_runs * batch)
        return self.pick_blocks(out.unflatten(1, (self.num_runs, batch, constant.shape[2]))).flatten(1, 3)

    def mean(self) -> Tensor:
        """Return the mean of each block's tokens, `[K, B, H, C, D]`, summed in float32."""
        chunks = torch.stack(tuple(self.chunks))
        sums = chunks.sum(3, dtype=torch.promote_types(chunks.dtype, torch.float32)).transpose(1, 2)
        slots = [sums[:, slot : slot + self.num_runs] for slot in range(self.num_slots)]
        means = self.pick_blocks(torch.stack(slots).sum(0)) / self.positions.shape[2]
        means = means + self.positions.mean(2, dtype=means.dtype)[:, None, None]
        return means.permute(0, 2, 3, 1, 4).to(chunks.dtype)

    def split_heads(self, out: Tensor) -> Tensor:
        """Return the result of `linear` as `[K, B, H, C, O]`."""
        (kinds, heads), batch = self.positions.shape[:2], len(self.chunks[0])
        if len(out) == kinds:
            return out.unflatten(1, (self.num_blocks, batch, heads)).permute(0, 2, 3, 1, 4)
        return out.unflatten(1, (self.num_blocks, batch)).unflatten(0, (kinds, heads)).permute(0, 3, 1, 2, 4)

    def mlp(self, first: Tensor, first_bias: Tensor, second: Tensor, second_bias: Tensor) -> Tensor:
        """Return two linear layers with a ReLU between them, `[K, B, H, C, O]`; weights are as in `linear`."""
        hidden = self.linear(first, first_bias).relu()
        second, second_bias = (t.to(projection_dtype(t)) for t in (second, second_bias))
        return self.split_heads(torch.baddbmm(second_bias[:, None], hidden, second.mT))


def make_chunks(
    tokens: Sequence[Tensor], block_size: int, stride: int, cu_seqlens: Tensor | None
) -> tuple[list[Tensor], Tensor | None]:
    """Return `chunks` and `first_chunks` of tokens `[B, T, H, D]` of each kind; T >= block_size, a multiple of d."""
    total = tokens[0].shape[1]
    if cu_seqlens is None:
        num_chunks = total // stride
        # A slice of all tokens is skipped, since its backward pass copies; under a compiler the slice always exists, so
        # that one graph serves every length.
        is_whole = not torch.compiler.is_compiling() and num_chunks * stride == total
        whole = tokens if is_whole else [t.narrow(1, 0, num_chunks * stride) for t in tokens]
        # Both sizes are given: a compiler that derives one divides by a quotient of the length, which inductor of
        # PyTorch 2.11 fails on.
        return [t.unflatten(1, (num_chunks, stride)) for t in whole], None
    starts = geometry.packed_block_starts(cu_seqlens, total, stride, stride)
    token = starts[:, None] + torch.arange(stride, device=tokens[0].device)
    first_chunks = geometry.packed_block_chunks(cu_seqlens, total, block_size, stride)
    used = first_chunks[:, None] + torch.arange(block_size // stride, device=first_chunks.device)
    is_used = torch.zeros(len(token), dtype=torch.bool, device=used.device).scatter(0, used.flatten(), True)
    # Chunks outside of every block are 0: the gradient of the weight multiplies them by 0, and a NaN would survive.
    return [torch.where(is_used[:, None, None, None], t[:, token], 0) for t in tokens], first_chunks


def stack_parameters(parameters: Sequence[Sequence[Tensor]], dtype: torch.dtype) -> list[Tensor]:
    """Stack the parameters of K networks of the same form, `[K, ...]` each in the dtype, by one copy and one cast."""
    flat = torch.cat([p.flatten() for same in zip(*parameters, strict=True) for p in same]).to(dtype)
    kinds = len(parameters)
    parts = flat.split([kinds * p.numel() for p in parameters[0]])
    return [part.view(kinds, *p.shape) for part, p in zip(parts, parameters[0], strict=True)]


def _add_products(constant: Tensor, rows: Tensor, weight: Tensor, repeats: int) -> Tensor:
    """Return `[K, num_runs * B * H, O]`: the constant of each head plus the products of its chunks, added over slots.

    constant: `[K, H, O]`, used `repeats` = num_runs * B times. rows: `[K, N * B * H, d * D]`. weight: `[K, O, l * D]`.
    With weights per head, K * H stands for K, and 1 for H.
    """
    # torch.compile fuses the copies and sums that autograd makes of slices, and torch.func needs operations it knows.
    if torch.compiler.is_compiling() or private.is_transformed() or private.is_forward_ad():
        return _sum_of_products(constant, rows, weight, repeats)
    return _SumOfProducts.apply(constant, rows, weight, repeats)


def _sum_of_products(constant: Tensor, rows: Tensor, weight: Tensor, repeats: int) -> Tensor:
    # Products are added in place, which saves a pass over memory. vmap needs a new tensor, as the product may be the
    # larger one, and so do dispatch modes, which may keep the result of an operation (selective checkpointing does).
    is_compiling = torch.compiler.is_compiling()
    is_watched = not is_compiling and (private.is_transformed() or private.may_be_dispatched())
    add = torch.baddbmm if is_watched else Tensor.baddbmm_
    out = constant.repeat(1, repeats, 1)
    for chunks, part in _slots(rows, weight, out.shape[1]):
        out = add(out, chunks, part.mT)
    return out


class _SumOfProducts(torch.autograd.Function):
    """`_sum_of_products` with gradients added in place; autograd would fill, copy and add all rows for each slice."""

    @staticmethod
    def forward(ctx: Any, constant: Tensor, rows: Tensor, weight: Tensor, repeats: int) -> Tensor:
        ctx.constant_shape = constant.shape
        ctx.save_for_backward(rows, weight)
        return _sum_of_products(constant, rows, weight, repeats)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        rows, weight = ctx.saved_tensors
        num_rows = grad.shape[1]
        grad_constant = grad_rows = grad_weight = None
        if ctx.needs_input_grad[0]:
            grad_constant = grad.reshape(len(grad), -1, *ctx.constant_shape[1:]).sum(1)
        # With beta = 0, baddbmm_ does not read the tensor that it writes.
        if ctx.needs_input_grad[1]:
            grad_rows = grad.new_empty(rows.shape)
            grad_rows[:, num_rows:] = 0
            for slot, (chunks, part) in enumerate(_slots(grad_rows, weight, num_rows)):
                chunks.baddbmm_(grad, part, beta=min(slot, 1))
        if ctx.needs_input_grad[2]:
            grad_weight = grad.new_empty(weight.shape)
            for chunks, part in _slots(rows, grad_weight, num_rows):
                part.baddbmm_(grad.mT, chunks, beta=0)
        return grad_constant, grad_rows, grad_weight, None


def _slots(rows: Tensor, weight: Tensor, num_rows: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield for each slot its chunks, `[K, num_rows, d * D]` of rows, and its weights `[K, O, d * D]`.

    Both are slices, made one after the other, so that autograd allows writing into each.
    """
    size = rows.shape[2]
    num_slots = weight.shape[2] // size
    step = (rows.shape[1] - num_rows) // max(1, num_slots - 1)
    for slot in range(num_slots):
        chunks = rows[:, slot * step : slot * step + num_rows]
        yield chunks, weight[:, :, slot * size : (slot + 1) * size]
