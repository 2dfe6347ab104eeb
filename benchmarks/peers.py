"""Public implementations of the selected branch, each behind an adapter. None is a dependency: where a checkout or an
installation of one is on PYTHONPATH, it can be measured.

An adapter takes a `Problem` and gives a forward, whose output is `[N, L, HQ, DV]`, and what is differentiated. Layouts
are changed before the forward, so that no time is counted but the peer's own.
"""

from __future__ import annotations

import importlib
import importlib.util
import re
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType

import torch
from torch import Tensor

Forward = tuple[Callable[[], Tensor], list[Tensor]]


@dataclass(frozen=True)
class Problem:
    """N sequences of length L: q `[N, L, HQ, D]`, k, v `[N, L, H, ·]`, blocks int32 `[N, L, H, n]`, ascending and then
    -1, counted from the start of the sequence. packed: they are one row to those who know packed rows.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    blocks: Tensor
    block_size: int
    packed: bool = False

    @property
    def borders(self) -> Tensor:
        """int32 `[N + 1]`: where the sequences begin and end when they lie one after the other."""
        count, length = self.q.shape[:2]
        return torch.arange(count + 1, dtype=torch.int32, device=self.q.device) * length

    @property
    def scale(self) -> float:
        return self.q.shape[3] ** -0.5

    def leaves(self, change: Callable[[Tensor], Tensor]) -> list[Tensor]:
        """q, k and v in another layout, to be differentiated."""
        return [change(t).detach().contiguous().requires_grad_() for t in (self.q, self.k, self.v)]

    def like_out(self, out: Tensor) -> Tensor:
        """Rows one after the other as `[N, L, HQ, DV]`."""
        return out.view(*self.q.shape[:3], self.v.shape[3])


@dataclass(frozen=True)
class Peer:
    """read: what the adapter was written by. file: where that lies on PYTHONPATH, the peer can be imported."""

    repository: str
    read: str
    file: str
    adapter: Callable[[Problem, Path], Forward]


def find_folder(file: str) -> Path | None:
    """The first of PYTHONPATH that has the file."""
    return next((Path(folder) for folder in sys.path if (Path(folder) / file).is_file()), None)


def make_forward(name: str, problem: Problem) -> Forward:
    """Raises ModuleNotFoundError where the peer, or what it needs, is not there."""
    peer = PEERS[name]
    folder = find_folder(peer.file)
    if folder is None:
        raise ModuleNotFoundError(f'{peer.repository} is not on PYTHONPATH')
    return peer.adapter(problem, folder)


def import_from(folder: Path, module: str) -> ModuleType:
    """A module of a package in the folder, without what the __init__ of the package imports.

    That may need more than the module does, and a package may be named as this one is.
    """
    name = module.split('.')[0]
    package = ModuleType(name)
    package.__path__ = [str(folder / name)]
    sys.modules.setdefault(name, package)
    return importlib.import_module(module)


def rows(t: Tensor) -> Tensor:
    return t.flatten(0, 1)


def heads_first(t: Tensor) -> Tensor:
    return t.transpose(1, 2)


def mdy666(problem: Problem, folder: Path) -> Forward:
    """`select_attn(q, k, v, topk, sm_scale)` of fcf117c: q `[tokens, HQ, D]`, topk `[H, tokens, n]`, ascending, padded
    with a block that does not exist. Sizes and borders are set on a class beforehand.
    """
    if importlib.util.find_spec('pkg_resources') is None:
        # setuptools no longer has it, and one function of it is used.
        module = ModuleType('pkg_resources')
        module.__dict__['parse_version'] = lambda text: tuple(map(int, re.findall(r'\d+', text)[:3]))
        sys.modules['pkg_resources'] = module
    select_attn = import_from(folder, 'flash_nsa.ops.select_attn').select_attn
    helper = importlib.import_module('flash_nsa.utils').NSAHelper
    helper.set_hyperparameters(block_size=problem.block_size, top_n=problem.blocks.shape[3])
    # Equal borders would leave what follows from an earlier block size.
    helper.x_cu_seqlens = None
    helper.init_cu_seqlens(problem.borders)
    num_blocks = -(-problem.q.shape[1] // problem.block_size)
    blocks = rows(problem.blocks).transpose(0, 1)
    blocks = blocks.masked_fill(blocks < 0, num_blocks).contiguous()
    leaves = problem.leaves(rows)
    return lambda: problem.like_out(select_attn(*leaves, blocks, problem.scale)), leaves


def xunhao(problem: Problem, folder: Path) -> Forward:
    """`topk_sparse_attention(q, k, v, topk_idx, block_size, cu_seqlens, softmax_scale)` of 9bea856: q
    `[tokens, HQ, D]`, topk_idx int32 `[H, tokens, n]`, ascending, padded with -1. Blocks of 32, 64, 128 or 256.
    """
    name = 'native_sparse_attention.ops.triton.topk_sparse_attention'
    return _attend_rows(import_from(folder, name).topk_sparse_attention, problem)


def fsa(problem: Problem, folder: Path) -> Forward:
    """`FSA_topk_sparse_attention(q, k, v, topk_idx, block_size, cu_seqlens, softmax_scale)` of 1da34f3, laid out as
    xunhao's. It goes over the sequences one by one.
    """
    module = import_from(folder, 'fsa.ops.FSA_topk_sparse_attention')
    return _attend_rows(module.FSA_topk_sparse_attention, problem)


def _attend_rows(attend: Callable[..., Tensor], problem: Problem) -> Forward:
    blocks = rows(problem.blocks).transpose(0, 1).contiguous()
    leaves, borders = problem.leaves(rows), problem.borders
    return lambda: problem.like_out(attend(*leaves, blocks, problem.block_size, borders, problem.scale)), leaves


def fla(problem: Problem, folder: Path) -> Forward:
    """`ParallelNSAFunction.apply(q, k, v, block_indices, block_counts, block_size, scale, cu_seqlens)` of bc3b101d
    (0.5.2), which `parallel_nsa` calls after it has pooled keys that a given choice does not need: q `[B, T, HQ, D]`,
    block_indices `[B, T, H, n]`, padded with -1. A kv head must have at least 16 query heads.
    """
    if problem.q.shape[2] < 16 * problem.k.shape[2]:
        raise ValueError('a kv head must have at least 16 query heads')
    attend = importlib.import_module('fla.ops.nsa.parallel').ParallelNSAFunction.apply
    num_selected, borders = problem.blocks.shape[3], problem.borders if problem.packed else None
    one_row = (lambda t: rows(t)[None]) if problem.packed else (lambda t: t)
    leaves, blocks = problem.leaves(one_row), one_row(problem.blocks).contiguous()
    settings = (num_selected, problem.block_size, problem.scale, borders)
    return lambda: problem.like_out(attend(*leaves, blocks, *settings)), leaves


def lucidrains(problem: Problem, folder: Path) -> Forward:
    """`native_sparse_attend(fq, fk, fv, block_size, selected_block_indices, fmask)` of 83fa271 (0.2.3): fq
    `[B, HQ, T, D]`, indices and mask `[B, H, T, n]` without the query's own block, which it always reads. It computes
    in float16, and knows no packed rows: sequences are a batch.
    """
    module = import_from(folder, 'native_sparse_attention_pytorch.triton_native_sparse_attention')
    blocks = heads_first(problem.blocks).long()
    own = torch.arange(problem.q.shape[1], device=blocks.device)[:, None] // problem.block_size
    mask = ((blocks >= 0) & (blocks != own)).contiguous()
    blocks = blocks.clamp(min=0).contiguous()
    leaves = problem.leaves(heads_first)
    return lambda: heads_first(module.native_sparse_attend(*leaves, problem.block_size, blocks, mask)), leaves


PEERS = {
    'mdy666': Peer('mdy666/Scalable-Flash-Native-Sparse-Attention', 'fcf117c', 'flash_nsa/ops/select_attn.py', mdy666),
    'xunhao': Peer(
        'XunhaoLai/native-sparse-attention-triton',
        '9bea856',
        'native_sparse_attention/ops/triton/topk_sparse_attention.py',
        xunhao,
    ),
    'fsa': Peer('Relaxed-System-Lab/Flash-Sparse-Attention', '1da34f3', 'fsa/ops/FSA_topk_sparse_attention.py', fsa),
    'fla': Peer('fla-org/flash-linear-attention', 'bc3b101d', 'fla/ops/nsa/parallel.py', fla),
    'lucidrains': Peer(
        'lucidrains/native-sparse-attention-pytorch',
        '83fa271',
        'native_sparse_attention_pytorch/triton_native_sparse_attention.py',
        lucidrains,
    ),
}
