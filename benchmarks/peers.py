"""Adapters of public implementations of Native Sparse Attention. None is a dependency: a peer is measured if a
checkout or an installation of it is on PYTHONPATH.

An adapter takes a `Problem` and returns `Steps`, which work on tensors in the layout of the peer. Layouts are changed
before a forward, so only the peer's own time counts.
"""

from __future__ import annotations

import importlib
import importlib.util
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.shapes import Shape

Forward = tuple[Callable[[], Tensor], list[Tensor]]
NSA_TENSORS = ('q', 'k', 'v', 'k_cmp', 'v_cmp', 'gates')


@dataclass(frozen=True)
class Problem:
    """Inputs of a case: N sequences of length L.

    tensors: those that the case needs of q `[N, L, HQ, D]`, k, v `[N, L, H, ·]`, k_cmp, v_cmp `[N, C, H, ·]`, gates
    `[N, L, HQ, 3]` and blocks int32 `[N, L, H, n]`, which are ascending, padded with -1 and counted from the start of
    the sequence. packed: implementations with packed rows get the sequences as one row.
    """

    shape: Shape
    tensors: dict[str, Tensor]

    @classmethod
    def of(cls, shape: Shape, tensors: Mapping[str, Tensor]) -> Problem:
        """Cut tensors `[B, T, ...]` into the sequences of a shape."""
        count = shape.batch * max(1, shape.num_sequences)
        return cls(shape, {name: t.flatten(0, 1).unflatten(0, (count, -1)) for name, t in tensors.items()})

    @property
    def q(self) -> Tensor:
        return self.tensors['q']

    @property
    def k(self) -> Tensor:
        return self.tensors['k']

    @property
    def v(self) -> Tensor:
        return self.tensors['v']

    @property
    def blocks(self) -> Tensor:
        return self.tensors['blocks']

    @property
    def packed(self) -> bool:
        return self.shape.num_sequences > 0

    @property
    def block_size(self) -> int:
        return self.shape.selection_block_size

    @property
    def size(self) -> tuple[int, int]:
        """N and L."""
        count = self.shape.batch * max(1, self.shape.num_sequences)
        return count, self.shape.tokens // count

    @property
    def num_compressed(self) -> int:
        """C."""
        return self.shape.batch * self.shape.num_compressed // self.size[0]

    @property
    def device(self) -> torch.device:
        return next(iter(self.tensors.values())).device

    def borders(self, length: int | None = None) -> Tensor:
        """Return int32 `[N + 1]`: cu_seqlens of the sequences, or of sequences of another length."""
        count, own_length = self.size
        return torch.arange(count + 1, dtype=torch.int32, device=self.device) * (
            own_length if length is None else length
        )

    @property
    def scale(self) -> float:
        return self.shape.head_dim**-0.5

    def leaves(self, change: Callable[[Tensor], Tensor], names: Sequence[str] = ('q', 'k', 'v')) -> list[Tensor]:
        """Return tensors in another layout, to be differentiated."""
        return [change(self.tensors[name]).detach().contiguous().requires_grad_() for name in names]

    def in_sequences(self, out: Tensor) -> Tensor:
        """Return packed rows as `[N, L, HQ, DV]`."""
        return out.view(*self.size, self.shape.heads, self.shape.value_dim)


def rows(t: Tensor) -> Tensor:
    return t.flatten(0, 1)


def heads_first(t: Tensor) -> Tensor:
    return t.transpose(1, 2)


@dataclass(frozen=True)
class Steps:
    """The steps of an implementation; None: it lacks the step.

    layout, unlay: from `[N, L, heads, ·]`, and back for an output `[N, L, HQ, DV]`.
    lay_blocks, unlay_blocks: from block indices `[N, L, H, n]`, and back.
    lay_gates: from `[N, L, HQ, 3]` after the sigmoid to the argument of `add`.
    compress(q, k_cmp, v_cmp): the output. choose(q, k_cmp, v_cmp): the output and the selected blocks.
    prepare_selection(q, k_cmp, v_cmp): a call that selects blocks and does nothing else.
    select(q, k, v, blocks), window(q, k, v), add(gates, compressed, selected, window): outputs.
    whole(*reads): all steps, if that is not one step after the other.
    """

    layout: Callable[[Tensor], Tensor]
    unlay: Callable[[Tensor], Tensor]
    lay_blocks: Callable[[Tensor], Tensor] = lambda blocks: blocks
    unlay_blocks: Callable[[Tensor], Tensor] = lambda blocks: blocks
    lay_gates: Callable[[Tensor], Tensor] = lambda gates: gates
    compress: Callable[..., Tensor] | None = None
    choose: Callable[..., tuple[Tensor, Tensor]] | None = None
    prepare_selection: Callable[..., Callable[[], Tensor]] | None = None
    select: Callable[..., Tensor] | None = None
    window: Callable[..., Tensor] | None = None
    add: Callable[..., Tensor] | None = None
    whole: Callable[..., Tensor] | None = None
    reads: tuple[str, ...] = NSA_TENSORS


def make_selected(steps: Steps, problem: Problem) -> Forward:
    """Return the selected branch of the problem's blocks, with outputs `[N, L, HQ, DV]`, and its inputs."""
    assert steps.select is not None
    leaves, blocks = problem.leaves(steps.layout), steps.lay_blocks(problem.blocks)
    select, unlay = steps.select, steps.unlay
    return lambda: unlay(select(*leaves, blocks)), leaves


@dataclass(frozen=True)
class Peer:
    """A public implementation. read: the commit that the adapter is for. file: on PYTHONPATH, it is importable.

    adapter: makes what a benchmark measures of a case and the folder. parts: cases of suite `parts` that it serves.
    max_group: most query heads per KV head. less: what the whole leaves out. layer: makes a module `[B, T, dim] →
    [B, T, dim]` from shape, dim and folder.
    """

    repository: str
    read: str
    file: str
    adapter: Callable[..., Any]
    parts: tuple[str, ...] = ()
    max_group: int = 1024
    less: str = ''
    layer: Callable[[Shape, int, Path], nn.Module] | None = None


def find_folder(file: str) -> Path | None:
    """Return the first folder of PYTHONPATH that has the file."""
    return next((Path(folder) for folder in sys.path if (Path(folder) / file).is_file()), None)


def make_steps(name: str, problem: Problem) -> Steps:
    return adapt(PEERS[name], problem)


def adapt(peer: Peer, *case: Any) -> Any:
    """Return what the adapter makes of a case. ModuleNotFoundError if the peer or a dependency of it is missing."""
    folder = find_folder(peer.file)
    if folder is None:
        raise ModuleNotFoundError(f'{peer.repository} is not on PYTHONPATH')
    return peer.adapter(*case, folder)


def import_from(folder: Path, module: str) -> ModuleType:
    """Import a module of a package without running the package's __init__.

    That may need more than the module does, and the package may have the name of this one.
    """
    name = module.split('.')[0]
    package = ModuleType(name)
    package.__path__ = [str(folder / name)]
    sys.modules.setdefault(name, package)
    return importlib.import_module(module)


def flash_window(problem: Problem) -> Callable[..., Tensor]:
    """Return FlashAttention-2 with a window on packed rows, of flash_attn if it is installed, else of PyTorch."""
    borders, length, left = problem.borders(), problem.size[1], problem.shape.window - 1
    if importlib.util.find_spec('flash_attn'):
        attend = importlib.import_module('flash_attn').flash_attn_varlen_func
        return lambda q, k, v: attend(q, k, v, borders, borders, length, length, causal=True, window_size=(left, 0))

    def window(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        sizes = (borders, borders, length, length)
        return torch.ops.aten._flash_attention_forward(
            *(q, k, v, *sizes, 0.0, True, False), scale=problem.scale, window_size_left=left, window_size_right=0
        )[0]

    return window


def dense_attention(backend: str, device: str, **options: Any) -> Callable[[Tensor, Tensor, Tensor], Tensor]:
    """Return dense attention of PyTorch, heads first, with its options; on a GPU by cuDNN or FlashAttention-2."""
    from torch.nn.attention import SDPBackend, sdpa_kernel

    kernel = SDPBackend.CUDNN_ATTENTION if backend == 'cudnn' else SDPBackend.FLASH_ATTENTION

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        with sdpa_kernel(kernel) if device != 'cpu' else nullcontext():
            return torch.nn.functional.scaled_dot_product_attention(q, k, v, **options)

    return attend


def weigh(gates: Tensor, *branches: Tensor) -> Tensor:
    """Return the gated sum in PyTorch, for peers without a kernel."""
    first, second, third = (gates[..., i : i + 1] * branch for i, branch in enumerate(branches))
    return first + second + third


def of_rows(problem: Problem, **steps: Any) -> Steps:
    """Return steps on packed rows, with blocks int32 `[H, tokens, n]` and the window of FlashAttention-2."""
    dtype = problem.shape.dtype
    common: dict[str, Any] = {
        'layout': rows,
        'unlay': problem.in_sequences,
        'lay_blocks': lambda blocks: rows(blocks).transpose(0, 1).contiguous(),
        'unlay_blocks': lambda blocks: blocks.transpose(0, 1).unflatten(0, problem.size),
        'lay_gates': lambda gates: rows(gates).to(dtype),
        'window': flash_window(problem),
        'add': weigh,
    }
    return Steps(**common | steps)


def stand_in_for_pkg_resources() -> None:
    """Replace pkg_resources, which setuptools no longer has; mdy666 uses one function of it."""
    if 'pkg_resources' not in sys.modules and importlib.util.find_spec('pkg_resources') is None:
        module = ModuleType('pkg_resources')
        module.__dict__['parse_version'] = lambda text: tuple(map(int, re.findall(r'\d+', text)[:3]))
        sys.modules['pkg_resources'] = module


def mdy666(problem: Problem, folder: Path) -> Steps:
    """Adapter for fcf117c.

    Functions `compress_attn(q, k, v, sm_scale)`, `slc_topk_indices(q, k, lse, sm_scale, …)`, `select_attn(q, k, v,
    topk, sm_scale)` and `fused_sigmoid_combine(a, b, c, logits)`: q `[tokens, HQ, D]`, topk `[H, tokens, n]`,
    ascending, padded with a block that does not exist. Sizes and borders are set on a class beforehand.
    """
    stand_in_for_pkg_resources()
    ops = {
        function: getattr(import_from(folder, f'flash_nsa.ops.{module}'), function)
        for module, function in (
            ('compress_attn', 'compress_attn'),
            ('topk', 'slc_topk_indices'),
            ('select_attn', 'select_attn'),
            ('combine', 'fused_sigmoid_combine'),
        )
    }
    helper = importlib.import_module('flash_nsa.utils').NSAHelper
    shape, scale = problem.shape, problem.scale
    sizes = (shape.compress_block_size, shape.compress_stride, shape.selection_block_size, shape.window)
    helper.set_hyperparameters(*sizes, top_n=shape.num_selected, num_init_blocks=1, num_local_blocks=2)
    # With equal borders the class would keep values of an earlier block size.
    helper.x_cu_seqlens = None
    helper.init_cu_seqlens(problem.borders())
    num_blocks = -(-problem.size[1] // problem.block_size)

    def choose(q: Tensor, k_cmp: Tensor, v_cmp: Tensor) -> tuple[Tensor, Tensor]:
        out, lse = ops['compress_attn'](q, k_cmp, v_cmp, scale)
        with torch.no_grad():
            # As its own module calls it.
            blocks, _ = ops['slc_topk_indices'](q, k_cmp, lse, scale, maybe_efficient_version=True, scale_slc_p=True)
        return out, blocks

    return of_rows(
        problem,
        lay_blocks=lambda blocks: rows(blocks.masked_fill(blocks < 0, num_blocks)).transpose(0, 1).contiguous(),
        compress=lambda *tensors: ops['compress_attn'](*tensors, scale)[0],
        choose=choose,
        select=lambda *tensors: ops['select_attn'](*tensors, scale),
        lay_gates=lambda gates: rows(gates).logit().to(shape.dtype),
        add=lambda gates, *branches: ops['fused_sigmoid_combine'](*branches, gates),
    )


def xunhao(problem: Problem, folder: Path) -> Steps:
    """Adapter for 9bea856: `compressed_attention(q, k, v, kernel_size, kernel_stride, block_size, topk, cu_seqlens_q,
    cu_seqlens_k, max_seqlen_q, max_seqlen_k, sm_scale, init_blocks, local_blocks)`, which selects blocks too, and
    `topk_sparse_attention(q, k, v, topk_idx, block_size, cu_seqlens, softmax_scale)`: q `[tokens, HQ, D]`, topk_idx
    int32 `[H, tokens, n]`, ascending, padded with -1. Blocks of 32, 64, 128 or 256.
    """
    ops = 'native_sparse_attention.ops.triton'
    module = import_from(folder, f'{ops}.compressed_attention')
    select = import_from(folder, f'{ops}.topk_sparse_attention').topk_sparse_attention
    return of_rows(problem, **_xunhao_steps(problem, module, select))


def fsa(problem: Problem, folder: Path) -> Steps:
    """Adapter for 1da34f3: `FSA_topk_sparse_attention`, with the layout of xunhao's; it loops over the sequences.

    Its compressed branch is a copy of xunhao's that selects head by head. With more than 8 query heads per KV head its
    layer uses a copy of xunhao's selected branch too.
    """
    ops = import_from(folder, 'fsa.ops.FSA_topk_sparse_attention')
    # Triton 3.6 does not accept a tuple of one pointer as a pointer.
    ops.reduce_kernel._unsafe_update_src(ops.reduce_kernel.src.replace('stride_lse_n,)', 'stride_lse_n)'))
    try:
        module = import_from(folder, 'nsa_ref.ops.compressed_attention')
    except ImportError:
        # The selected branch does not need it.
        module = None
    steps = _xunhao_steps(problem, module, ops.FSA_topk_sparse_attention, parallel_topk_compute=False)
    return of_rows(problem, **steps)


def _xunhao_steps(problem: Problem, module: Any, select: Callable[..., Tensor], **settings: Any) -> dict[str, Any]:
    shape, scale, borders = problem.shape, problem.scale, problem.borders()
    (_, length), num_compressed = problem.size, problem.num_compressed
    lengths = (borders, problem.borders(num_compressed), length, num_compressed, scale)
    sizes = (shape.compress_block_size, shape.compress_stride)

    def choose(q: Tensor, k_cmp: Tensor, v_cmp: Tensor) -> tuple[Tensor, Tensor]:
        chosen = (problem.block_size, shape.num_selected)
        return module.compressed_attention(
            *(q, k_cmp, v_cmp, *sizes, *chosen, *lengths), init_blocks=1, local_blocks=2, **settings
        )

    return {
        'compress': lambda *tensors: module.CompressedAttention.apply(*tensors, *sizes, *lengths)[0],
        'choose': choose,
        'select': lambda *tensors: select(*tensors, problem.block_size, borders, scale),
    }


def fla(problem: Problem, folder: Path) -> Steps:
    """Adapter for bc3b101d (0.5.2): `ParallelNSAFunction.apply(q, k, v, block_indices, block_counts, block_size, scale,
    cu_seqlens)`, which `parallel_nsa` calls after pooling keys, which given blocks do not need, and
    `parallel_nsa(q, k, v, g_cmp, g_slc, …)` without its window, which needs flash_attn: q `[B, T, HQ, D]`,
    block_indices `[B, T, H, n]`, padded with -1. A kv head must have at least 16 query heads.
    """
    shape = problem.shape
    if shape.heads < 16 * shape.kv_heads:
        raise ValueError('a kv head must have at least 16 query heads')
    module = importlib.import_module('fla.ops.nsa.parallel')
    borders = problem.borders() if problem.packed else None
    one_row = (lambda t: rows(t)[None]) if problem.packed else (lambda t: t)
    settings = (shape.num_selected, problem.block_size, problem.scale, borders)
    window = flash_window(problem)

    def whole(q: Tensor, k: Tensor, v: Tensor, gates: Tensor) -> Tensor:
        sizes = {'block_counts': shape.num_selected, 'block_size': problem.block_size, 'cu_seqlens': borders}
        out = module.parallel_nsa(q, k, v, gates[..., 0], gates[..., 1], scale=problem.scale, **sizes)
        near = window(*map(rows, (q, k, v))).view_as(out)
        return torch.addcmul(out, near, gates[..., 2:])

    return Steps(
        layout=one_row,
        unlay=problem.in_sequences,
        lay_blocks=lambda blocks: one_row(blocks).contiguous(),
        lay_gates=lambda gates: one_row(gates).to(shape.dtype),
        select=lambda *tensors: module.ParallelNSAFunction.apply(*tensors, *settings),
        whole=whole,
        reads=('q', 'k', 'v', 'gates'),
    )


def lucidrains(problem: Problem, folder: Path) -> Steps:
    """Adapter for 83fa271 (0.2.3): `native_sparse_attend(fq, fk, fv, block_size, selected_block_indices, fmask)`: fq
    `[B, HQ, T, D]`, indices and mask `[B, H, T, n]` without the query's own block, which it always reads. It computes
    in float16 and has no packed rows: sequences are a batch.
    """
    module = import_from(folder, 'native_sparse_attention_pytorch.triton_native_sparse_attention')

    def lay_blocks(blocks: Tensor) -> Any:
        blocks = heads_first(blocks).long()
        own = torch.arange(problem.size[1], device=blocks.device)[:, None] // problem.block_size
        mask = ((blocks >= 0) & (blocks != own)).contiguous()
        return blocks.clamp(min=0).contiguous(), mask

    def select(q: Tensor, k: Tensor, v: Tensor, blocks: Any) -> Tensor:
        return module.native_sparse_attend(q, k, v, problem.block_size, *blocks)

    return Steps(heads_first, heads_first, lay_blocks=lay_blocks, select=select)


def lucidrains_layer(shape: Shape, dim: int, folder: Path) -> nn.Module:
    """Make `SparseAttention` of 83fa271 (0.2.3).

    Its window reads one key more than its size, and it reads the own block beyond the selected ones.
    """
    module = import_from(folder, 'native_sparse_attention_pytorch.native_sparse_attention')
    sizes = (shape.compress_block_size, shape.compress_stride, shape.selection_block_size, shape.num_selected - 1)
    settings = {'kv_heads': shape.kv_heads, 'causal': shape.causal, 'use_triton_kernel': True}
    return module.SparseAttention(dim, shape.head_dim, shape.heads, shape.window - 1, *sizes, **settings)


WHOLE = ('nsa', 'nsa-unrelated')
PEERS = {
    'mdy666': Peer(
        'mdy666/Scalable-Flash-Native-Sparse-Attention',
        'fcf117c',
        'flash_nsa/ops/select_attn.py',
        mdy666,
        ('compressed', 'compressed+selection', 'selected', 'sum', *WHOLE),
    ),
    'xunhao': Peer(
        'XunhaoLai/native-sparse-attention-triton',
        '9bea856',
        'native_sparse_attention/ops/triton/topk_sparse_attention.py',
        xunhao,
        ('compressed', 'compressed+selection', 'selected', *WHOLE),
    ),
    'fsa': Peer(
        'Relaxed-System-Lab/Flash-Sparse-Attention',
        '1da34f3',
        'fsa/ops/FSA_topk_sparse_attention.py',
        fsa,
        ('compressed+selection', 'selected', *WHOLE),
        max_group=8,
    ),
    'fla': Peer(
        'fla-org/flash-linear-attention',
        'bc3b101d',
        'fla/ops/nsa/parallel.py',
        fla,
        WHOLE,
        less="its compressed keys are means of blocks of l' that do not overlap, a quarter of ours",
    ),
    'lucidrains': Peer(
        'lucidrains/native-sparse-attention-pytorch',
        '83fa271',
        'native_sparse_attention_pytorch/triton_native_sparse_attention.py',
        lucidrains,
        ('layer',),
        layer=lucidrains_layer,
    ),
}
