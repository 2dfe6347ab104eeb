"""Blocks that overlap and are not laid out, and the arithmetic that networks do with them.

Each chunk of d tokens is multiplied by the part of the weights that stands at its place in a block, and the products of
neighbouring chunks are added. Keys and values are K kinds of blocks, computed together where their networks allow it.

Legend: that of `compress`, with K kinds and N chunks.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from native_sparse_attention.core import geometry, private
from native_sparse_attention.core.projection import projection_dtype


class OverlappingBlocks(NamedTuple):
    """The chunks c … c + l / d - 1 from every chunk c on, plus what every block adds.

    chunks: of each kind `[B, N, d, H, D]`, any strides. positions: `[K, H, l, D]`. first_chunks: int64 `[C]`, where
    those blocks begin that there are; None: all N - l / d + 1 are.
    """

    chunks: Sequence[Tensor]
    positions: Tensor
    first_chunks: Tensor | None = None

    def that_there_are(self, of_blocks: Tensor) -> Tensor:
        """Of results `[K, every chunk's block, ...]`, those of the C blocks."""
        return of_blocks if self.first_chunks is None else of_blocks[:, self.first_chunks]

    @property
    def num_places(self) -> int:
        """l / d."""
        return self.positions.shape[2] // self.chunks[0].shape[2]

    @property
    def num_blocks(self) -> int:
        """Of every chunk's block, whether there is one or not."""
        return self.chunks[0].shape[1] - self.num_places + 1

    @property
    def num_left(self) -> int:
        """C."""
        return self.num_blocks if self.first_chunks is None else len(self.first_chunks)

    def times(self, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        """A linear layer of flat blocks, `[K, C * B * H, O]` or of each head `[K * H, C * B, O]`.

        weight, bias: as `nn.Linear` has them, `[K, O, l * D]`, `[K, O]`, or of each head `[K * H, O, l * D]`,
        `[K * H, O]`.
        """
        kinds, batch = len(self.chunks), len(self.chunks[0])
        if len(weight) == kinds:
            rows = torch.stack([c.permute(1, 0, 3, 2, 4) for c in self.chunks]).flatten(4)  # [K, N, B, H, d * D]
            positions = self.positions.flatten(2)
        else:
            rows = torch.stack([c.permute(3, 1, 0, 2, 4) for c in self.chunks])
            rows = rows.flatten(4).flatten(0, 1)  # [K * H, N, B, d * D]
            positions = self.positions.flatten(2).flatten(0, 1)[:, None]
        # Cast once here: autocast would cast every part anew.
        weight, bias = weight.to(projection_dtype(weight)), None if bias is None else bias.to(projection_dtype(bias))
        rows = rows.to(projection_dtype(rows))
        # The weight stands first, so that its derivative is laid out as it is: [K, O, H] or [K * H, O, 1].
        columns = positions.to(rows.dtype).mT
        constant = torch.bmm(weight, columns) if bias is None else torch.baddbmm(bias[..., None], weight, columns)
        out = _add_products(constant.mT, rows.flatten(1, -2), weight, self.num_blocks * batch)
        return self.that_there_are(out.unflatten(1, (self.num_blocks, batch, constant.shape[2]))).flatten(1, 3)

    def mean(self) -> Tensor:
        """`[K, B, H, C, D]`, summed in float32."""
        chunks = torch.stack(tuple(self.chunks))
        sums = chunks.sum(3, dtype=torch.promote_types(chunks.dtype, torch.float32)).transpose(1, 2)
        places = [sums[:, place : place + self.num_blocks] for place in range(self.num_places)]
        means = self.that_there_are(torch.stack(places).sum(0)) / self.positions.shape[2]
        means = means + self.positions.mean(2, dtype=means.dtype)[:, None, None]
        return means.permute(0, 2, 3, 1, 4).to(chunks.dtype)

    def heads_apart(self, out: Tensor) -> Tensor:
        """`[K, B, H, C, O]` of rows as `times` has them."""
        (kinds, heads), batch = self.positions.shape[:2], len(self.chunks[0])
        if len(out) == kinds:
            return out.unflatten(1, (self.num_left, batch, heads)).permute(0, 2, 3, 1, 4)
        return out.unflatten(1, (self.num_left, batch)).unflatten(0, (kinds, heads)).permute(0, 3, 1, 2, 4)

    def through_mlp(self, first: Tensor, first_bias: Tensor, second: Tensor, second_bias: Tensor) -> Tensor:
        """`[K, B, H, C, O]`: a layer with a ReLU and another, whose weights are as in `times`."""
        hidden = self.times(first, first_bias).relu()
        second, second_bias = (t.to(projection_dtype(t)) for t in (second, second_bias))
        out = torch.baddbmm(second_bias[:, None], hidden, second.mT)
        return self.heads_apart(out)


def lay_out_chunks(
    tokens: Sequence[Tensor], block_size: int, stride: int, cu_seqlens: Tensor | None
) -> tuple[list[Tensor], Tensor | None]:
    """chunks and first_chunks of the blocks of tokens `[B, T, H, D]`, T at least l = block_size, a multiple of d."""
    total = tokens[0].shape[1]
    if cu_seqlens is None:
        num_chunks = total // stride
        # Of all tokens there is no slice, whose derivative would be a copy; for the compiler there always is one, so
        # that one graph serves every length.
        is_whole = not torch.compiler.is_compiling() and num_chunks * stride == total
        whole = tokens if is_whole else [t.narrow(1, 0, num_chunks * stride) for t in tokens]
        # Both sizes by name: a compiler that has to find one divides by a quotient of the length, which inductor of
        # PyTorch 2.11 fails on.
        return [t.unflatten(1, (num_chunks, stride)) for t in whole], None
    starts = geometry.packed_block_starts(cu_seqlens, total, stride, stride)
    token = starts[:, None] + torch.arange(stride, device=tokens[0].device)
    first_chunks = geometry.packed_block_chunks(cu_seqlens, total, block_size, stride)
    used = first_chunks[:, None] + torch.arange(block_size // stride, device=first_chunks.device)
    is_used = torch.zeros(len(token), dtype=torch.bool, device=used.device).scatter(0, used.flatten(), True)
    # 0 in chunks of no block: a product of weights may meet them with gradients of 0, which NaN would make NaN.
    return [torch.where(is_used[:, None, None, None], t[:, token], 0) for t in tokens], first_chunks


def join(parameters: Sequence[Sequence[Tensor]], dtype: torch.dtype) -> list[Tensor]:
    """The first, second, … of each of K networks' parameters, `[K, ...]` in the dtype: one copy and one cast of all."""
    flat = torch.cat([p.flatten() for alike in zip(*parameters, strict=True) for p in alike]).to(dtype)
    kinds = len(parameters)
    parts = flat.split([kinds * p.numel() for p in parameters[0]])
    return [part.view(kinds, *p.shape) for part, p in zip(parts, parameters[0], strict=True)]


def _add_products(constant: Tensor, rows: Tensor, weight: Tensor, repeats: int) -> Tensor:
    """`[K, C * B * H, O]`: the constant of every head, `repeats` = C * B times, plus the products of every place.

    constant: `[K, H, O]`. rows: `[K, N * B * H, d * D]`. weight: `[K, O, l * D]`. Or K * H stands for K, and 1 for H.
    """
    # torch.compile makes one kernel of autograd's copies and sums of slices, and torch.func looks into operations.
    if torch.compiler.is_compiling() or private.is_transformed() or private.is_forward_ad():
        return _sum_of_products(constant, rows, weight, repeats)
    return _SumOfProducts.apply(constant, rows, weight, repeats)


def _sum_of_products(constant: Tensor, rows: Tensor, weight: Tensor, repeats: int) -> Tensor:
    # Products are added in place to what every block has alike, so that nothing goes through memory once more. Not so
    # under vmap, whose tensors may be larger than what they are added to, and under dispatch modes, which may keep what
    # an operation returns, as selective checkpointing does.
    add = torch.baddbmm if not torch.compiler.is_compiling() and _is_watched() else Tensor.baddbmm_
    out = constant.repeat(1, repeats, 1)
    for chunks, part in _places(rows, weight, out.shape[1]):
        out = add(out, chunks, part.mT)
    return out


def _is_watched() -> bool:
    return private.is_transformed() or private.may_be_dispatched()


class _SumOfProducts(torch.autograd.Function):
    """The same, with derivatives that are added in place too: autograd fills, copies and adds all rows for a slice."""

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
        # With beta = 0 nothing is read of what is written.
        if ctx.needs_input_grad[1]:
            grad_rows = grad.new_empty(rows.shape)
            grad_rows[:, num_rows:] = 0
            for place, (chunks, part) in enumerate(_places(grad_rows, weight, num_rows)):
                chunks.baddbmm_(grad, part, beta=min(place, 1))
        if ctx.needs_input_grad[2]:
            grad_weight = grad.new_empty(weight.shape)
            for chunks, part in _places(rows, grad_weight, num_rows):
                part.baddbmm_(grad.mT, chunks, beta=0)
        return grad_constant, grad_rows, grad_weight, None


def _places(rows: Tensor, weight: Tensor, num_rows: int) -> Iterator[tuple[Tensor, Tensor]]:
    """For each place, the rows `[K, num_rows, d * D]` of the chunks that stand there and their weights `[K, O, d * D]`.

    Slices, and one after the other, so that autograd lets each be written into.
    """
    size = rows.shape[2]
    num_places = weight.shape[2] // size
    step = (rows.shape[1] - num_rows) // max(1, num_places - 1)
    for place in range(num_places):
        chunks = rows[:, place * step : place * step + num_rows]
        yield chunks, weight[:, :, place * size : (place + 1) * size]
