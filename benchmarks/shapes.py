"""Shapes of the benchmarks, and inputs for them.

Shapes `paper-…` are those of the paper's model (64 query heads of size 128, l/d/l'/n/W = 32/16/64/16/512), `trainer` is
the model of train_enwik8.py, and the others change one thing each.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from fnmatch import fnmatch
from typing import Any

import torch
from torch import Tensor


@dataclass(frozen=True)
class Shape:
    """Sizes of a case: B, T, HQ, H, D, DV; l, d, l', n, W. num_sequences: equal packed sequences per row, or 0."""

    name: str
    batch: int = 1
    seqlen: int = 8192
    heads: int = 64
    kv_heads: int = 4
    head_dim: int = 128
    value_dim: int = 128
    compress_block_size: int = 32
    compress_stride: int = 16
    selection_block_size: int = 64
    num_selected: int = 16
    window: int = 512
    dtype: torch.dtype = torch.bfloat16
    causal: bool = True
    share_group: bool = True
    use_diff_topk: bool = False
    num_sequences: int = 0

    @property
    def tokens(self) -> int:
        return self.batch * self.seqlen

    @property
    def num_compressed(self) -> int:
        length = self.seqlen // max(1, self.num_sequences)
        return max(1, self.num_sequences) * max(0, (length - self.compress_block_size) // self.compress_stride + 1)

    @property
    def window_size(self) -> tuple[int, int]:
        return self.window - 1, 0 if self.causal else self.window - 1

    @property
    def block_sizes(self) -> dict[str, int]:
        """Arguments of the ops: l, d and l'."""
        names = ('compress_block_size', 'compress_stride', 'selection_block_size')
        return {name: getattr(self, name) for name in names}

    @property
    def index_heads(self) -> int:
        return self.kv_heads if self.share_group else self.heads

    def described(self) -> str:
        sizes = (self.compress_block_size, self.compress_stride, self.selection_block_size, self.num_selected)
        parts = [
            f'{self.batch} × {self.seqlen:,} tokens, {self.heads}/{self.kv_heads} heads of {self.head_dim}',
            f"l/d/l'/n/W {'/'.join(map(str, (*sizes, self.window)))}",
            str(self.dtype).removeprefix('torch.'),
        ]
        parts += ['not causal'] * (not self.causal) + ['each head selects its own blocks'] * (not self.share_group)
        parts += ['use_diff_topk'] * self.use_diff_topk
        parts += [f'{self.num_sequences} packed sequences'] * (self.num_sequences > 0)
        return ', '.join(parts)


PAPER = Shape('paper')
TRAINER = Shape(
    'trainer', batch=4, seqlen=8192, heads=8, kv_heads=4, head_dim=64, value_dim=64, compress_block_size=16,
    compress_stride=8, selection_block_size=16, num_selected=5, window=64, use_diff_topk=True,
)  # fmt: skip

# HQ, H, D, and batch and length of the shapes `heads-<HQ>-<H>x<D>-<label>`.
HEAD_LAYOUTS = (
    (32, 8, 128, {'8k': (1, 8192), '64k': (1, 65536)}),
    (8, 4, 64, {'4x8k': (4, 8192), '64k': (1, 65536)}),
    (16, 16, 128, {'8k': (1, 8192), '16k': (1, 16384), '32k': (1, 32768)}),
    (24, 4, 96, {'16k': (1, 16384), '48k': (1, 49152)}),
    (24, 4, 80, {'16k': (1, 16384), '48k': (1, 49152)}),
)

SHAPES: dict[str, Shape] = {
    shape.name: shape
    for shape in (
        *(
            replace(PAPER, name=f'paper-{seqlen // 1024}k-h{kv_heads}', seqlen=seqlen, kv_heads=kv_heads)
            for seqlen in (8192, 16384, 32768, 65536)
            for kv_heads in (4, 16, 64)
        ),
        TRAINER,
        replace(PAPER, name='head-64', seqlen=16384, head_dim=64, value_dim=64),
        replace(PAPER, name='packed', seqlen=16384, num_sequences=4),
        replace(PAPER, name='not-causal', causal=False),
        replace(PAPER, name='alone', kv_heads=16, share_group=False),
        replace(PAPER, name='diff-topk', seqlen=16384, use_diff_topk=True),
        replace(PAPER, name='float16', dtype=torch.float16),
        replace(PAPER, name='float32', heads=16, kv_heads=1, dtype=torch.float32),
        replace(PAPER, name='many-64k-h4', seqlen=65536, num_sequences=64),
        *(
            replace(PAPER, name=f'long-{seqlen // 1024}k-h4', seqlen=seqlen)
            for seqlen in (2**17, 2**18, 2**19, 2**20)
        ),
        replace(PAPER, name='long-1024k-q32', seqlen=2**20, heads=32, kv_heads=2),
        replace(PAPER, name='large-8k-h2', kv_heads=2),
        replace(PAPER, name='large-64k-h2', seqlen=65536, kv_heads=2),
        replace(PAPER, name='large-64k-h1', seqlen=65536, kv_heads=1),
        replace(PAPER, name='short-4k-h4', seqlen=4096),
        *(
            replace(PAPER, name=f'short-{seqlen // 1024}k-h{kv_heads}', seqlen=seqlen, kv_heads=kv_heads)
            for seqlen in (4096, 8192)
            for kv_heads in (8, 16, 64)
        ),
        # The trainer's model with a budget as in the paper, 65,536 tokens a step; Llama's heads.
        *(
            replace(PAPER, name=f'budget-{seqlen // 1024}k', batch=2**16 // seqlen, seqlen=seqlen, heads=8,
                    head_dim=64, value_dim=64, use_diff_topk=True)
            for seqlen in (8192, 16384, 32768)
        ),
        *(
            replace(PAPER, name=f'llama-{seqlen // 1024}k', seqlen=seqlen, heads=32, kv_heads=8)
            for seqlen in (16384, 32768)
        ),
        # Further head layouts and lengths of suite `layouts`.
        *(
            replace(PAPER, name=f'heads-{heads}-{kv_heads}x{dim}-{label}', batch=batch, seqlen=seqlen, heads=heads,
                    kv_heads=kv_heads, head_dim=dim, value_dim=dim)
            for heads, kv_heads, dim, sizes in HEAD_LAYOUTS
            for label, (batch, seqlen) in sizes.items()
        ),
        # To try the scripts on a CPU.
        replace(TRAINER, name='tiny', batch=1, seqlen=96, heads=4, kv_heads=2, head_dim=16, value_dim=16, window=16,
                dtype=torch.float32),
        replace(TRAINER, name='tiny-packed', batch=1, seqlen=96, heads=2, kv_heads=1, head_dim=16, value_dim=16,
                dtype=torch.float32, num_sequences=3, use_diff_topk=False),
    )
}  # fmt: skip


TENSORS = ('q', 'k', 'v', 'k_cmp', 'v_cmp', 'gates')
# Correlation of consecutive tokens in make_tensors; at a distance of 64 tokens it is a half.
RHO = 0.99
# Prefixes of names that `*` does not match.
BY_NAME_ONLY = ('tiny', 'many', 'long', 'short', 'heads')


def find_names(names: Iterable[str], patterns: str) -> list[str]:
    """Return the names that match a pattern, in the given order. `*` leaves out those that begin like BY_NAME_ONLY.

    SystemExit if a pattern matches nothing.
    """
    names, found = list(names), set[str]()
    for pattern in patterns.split(','):
        is_named = pattern.startswith(BY_NAME_ONLY)
        matching = {
            name for name in names if fnmatch(name, pattern) and (is_named or not name.startswith(BY_NAME_ONLY))
        }
        if not matching:
            raise SystemExit(f'nothing is named {pattern}; there are {", ".join(names)}')
        found |= matching
    return [name for name in names if name in found]


def make_inputs(shape: Shape, device: str) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Make random tensors and settings of `nsa`."""
    return make_tensors(shape, device, TENSORS), make_settings(shape, device)


def make_tensors(shape: Shape, device: str, names: Iterable[str], rho: float = 0) -> dict[str, Tensor]:
    """Make the named ones of TENSORS, each independent of the others: normal with variance 1, gates uniform.

    rho: correlation of consecutive tokens in q, k and v (AR(1)); of compressed tokens, a stride apart, rho**stride.
    Consecutive queries then select similar blocks, as in trained models. 0: unrelated tokens.
    """
    rows = (shape.batch, shape.seqlen)
    compressed = (shape.batch, shape.num_compressed, shape.kv_heads)
    sizes = {
        'q': (*rows, shape.heads, shape.head_dim),
        'k': (*rows, shape.kv_heads, shape.head_dim),
        'v': (*rows, shape.kv_heads, shape.value_dim),
        'k_cmp': (*compressed, shape.head_dim),
        'v_cmp': (*compressed, shape.value_dim),
    }
    made = {}
    for name in names:
        generator = torch.Generator(device).manual_seed(TENSORS.index(name))
        if name == 'gates':
            made[name] = torch.rand(*rows, shape.heads, 3, device=device, generator=generator)
        else:
            step = shape.compress_stride if name.endswith('_cmp') else 1
            made[name] = normal(sizes[name], shape.dtype, generator, rho**step if rho else 0)
    return made


def normal(size: tuple[int, int, int, int], dtype: torch.dtype, generator: torch.Generator, rho: float) -> Tensor:
    """Make `[B, T, heads, D]` of mean 0 and variance 1: x[t] = rho * x[t - 1] + sqrt(1 - rho^2) * noise[t]."""
    if rho == 0:
        return torch.randn(size, dtype=dtype, device=generator.device, generator=generator)
    batch, length, heads, dim = size
    out = torch.empty(size, dtype=dtype, device=generator.device)
    # Head by head, so that float32 takes little memory.
    for head in range(heads):
        x = torch.randn(batch, length, dim, device=generator.device, generator=generator)
        x[:, 1:] *= (1 - rho**2) ** 0.5
        reach = 1
        # Double the span of the sum until the factor of a step vanishes.
        while reach < length and rho**reach > 1e-4:
            x[:, reach:] += rho**reach * x[:, :-reach]
            reach *= 2
        out[:, :, head] = x
    return out


def make_settings(shape: Shape, device: str) -> dict[str, Any]:
    settings: dict[str, Any] = {
        **shape.block_sizes,
        'num_selected': shape.num_selected,
        'window_size': shape.window_size,
        'causal': shape.causal,
        'share_group': shape.share_group,
        'use_diff_topk': shape.use_diff_topk,
    }
    if shape.num_sequences:
        length = shape.seqlen // shape.num_sequences
        borders = torch.arange(shape.num_sequences + 1, dtype=torch.int32, device=device) * length
        settings['cu_seqlens'] = borders
    return settings


def make_blocks(shape: Shape, device: str, neighbours: int = 1) -> Tensor:
    """Make int32 `[B, T, index_heads, n]`: the first block, the own block, the one before it, and random others.

    neighbours: number of consecutive queries that share most random blocks, as in trained models.
    """
    generator = torch.Generator(device).manual_seed(1)
    length = shape.seqlen // max(1, shape.num_sequences)
    num_blocks = -(-length // shape.selection_block_size)
    block = torch.arange(num_blocks, device=device)
    chosen = torch.full(
        (shape.batch, shape.seqlen, shape.index_heads, shape.num_selected), -1, dtype=torch.int32, device=device
    )
    chunk = max(neighbours, 2**26 // (shape.batch * shape.index_heads * num_blocks) // neighbours * neighbours)
    for start in range(0, shape.seqlen, chunk):
        stop = min(shape.seqlen, start + chunk)
        own = (torch.arange(start, stop, device=device) % length // shape.selection_block_size)[:, None, None]
        size = (shape.batch, -(-(stop - start) // neighbours), shape.index_heads, num_blocks)
        lots = torch.rand(size, device=device, generator=generator).repeat_interleave(neighbours, 1)[:, : stop - start]
        if neighbours > 1:
            lots = lots + 0.03 * torch.rand(lots.shape, device=device, generator=generator)
        forced = (block == 0) | (block == own) | (block == own - 1)
        allowed = block <= own if shape.causal else torch.ones_like(forced)
        lots = lots.masked_fill(forced, 2).masked_fill(~allowed, -1)
        drawn = lots.topk(min(shape.num_selected, num_blocks), -1)
        blocks = drawn.indices.masked_fill(drawn.values < 0, num_blocks).sort(-1).values
        chosen[:, start:stop, :, : blocks.shape[-1]] = blocks.masked_fill(blocks == num_blocks, -1).int()
    return chosen
