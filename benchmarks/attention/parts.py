"""Suite `parts`: the parts of `nsa` and the whole, from 4k to 1M tokens, of ours, dense attention and peers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from itertools import product
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks import judge, peers
from benchmarks.attention.backends import DIM
from benchmarks.attention.backends import make_call as make_by_backend
from benchmarks.attention.parts_report import (
    CUDNN,
    FEWER_HEADS,
    FLASH,
    FLEX,
    OURS,
    PARTS,
    make_tables,
    plot_shares,
    plot_times,
    shape_of,
)
from benchmarks.attention.suite import Suite
from benchmarks.judge import BRANCHES
from benchmarks.peers import NSA_TENSORS, PEERS, Forward, Problem, Steps, heads_first, rows
from benchmarks.runner import Call, Case, Method, Plot
from benchmarks.shapes import RHO, Shape, make_settings, make_tensors, normal
from benchmarks.timing import measure_with_kernels

# Targets first, then the shapes that are compared with peers, then the rest of the curves over the length.
DEFAULT_SHAPES = (
    'paper-64k-h4', 'paper-8k-h4', 'paper-32k-h16', 'paper-32k-h64', 'head-64', 'trainer', 'short-4k-h4',
    'paper-16k-h4', 'paper-32k-h4', 'long-128k-h4', 'long-256k-h4', 'long-512k-h4', 'long-1024k-h4', FEWER_HEADS,
)  # fmt: skip
# Tokens. Longer, dense attention takes minutes, and several peers crash.
MAX_DENSE = MAX_PEER = 2**17
MAX_LAYER = 2**16
# Tokens times heads; larger tensors do not fit on one GPU.
MAX_WHOLE = 2**20 * 32
# Parts of PyTorch's attentions.
OTHERS = {CUDNN: ('nsa',), FLASH: ('window', 'nsa'), FLEX: ('window',)}
READS = {
    'compressed': ('q', 'k_cmp', 'v_cmp'),
    'compressed+selection': ('q', 'k_cmp', 'v_cmp'),
    'selection': ('q', 'k_cmp', 'v_cmp'),
    'selected': ('q', 'k', 'v'),
    'window': ('q', 'k', 'v'),
    'sum': ('gates', *BRANCHES),
}


def make_problem(part: str, shape: Shape, device: str) -> Problem:
    """Make the inputs of a part. Consecutive tokens correlate by RHO, except in 'nsa-unrelated'."""
    names = READS.get(part, NSA_TENSORS)
    if part == 'selected':
        names = (*names, 'k_cmp', 'v_cmp')
    rho = 0 if part == 'nsa-unrelated' else RHO
    tensors = make_tensors(shape, device, [name for name in names if name not in BRANCHES], rho)
    size = (shape.batch, shape.seqlen, shape.heads, shape.value_dim)
    tensors |= {name: torch.randn(size, dtype=shape.dtype, device=device) for name in names if name in BRANCHES}
    return Problem.of(shape, tensors)


def make_call(case: Case) -> tuple[Call, list[Tensor]]:
    part, backend, shape = case['op'], case['backend'], shape_of(case['shape'])
    if part.startswith('layer'):
        forward, leaves = make_layer(part, shape, backend, case['device'])
        return Call(forward), leaves
    problem = make_problem(part, shape, case['device'])
    steps = ours(problem) if backend == OURS else make_steps(part, backend, problem)
    call, leaves = make_part(part, steps, problem, dense=backend in (CUDNN, FLASH))
    if backend in PEERS and PEERS[backend].less:
        # The output differs by design.
        return Call(call.forward, lambda: {'note': 'does less'}), leaves
    return call, leaves


def make_part(part: str, steps: Steps, problem: Problem, dense: bool = False) -> tuple[Call, list[Tensor]]:
    """Return a forward with outputs `[N, L, HQ, DV]`, whose facts judge them, and the tensors to differentiate."""
    if part in ('compressed+selection', 'selection'):
        return make_selection(part, steps, problem)
    match part:
        case 'compressed':
            attend, gold = steps.compress, judge.compressed_row
        case 'selected':
            tensors = [t.detach() for t in problem.leaves(steps.layout, READS['selection'])]
            blocks = needed(steps.choose)(*tensors)[1]
            problem.tensors['blocks'] = steps.unlay_blocks(blocks)
            attend, gold = partial(select_blocks, needed(steps.select), blocks), judge.selected_row
        case 'window':
            attend, gold = steps.window, judge.window_row
        case 'sum':
            attend, gold = steps.add, judge.sum_row
        case _:
            attend = steps.whole or partial(attend_in_steps, steps)
            gold = judge.dense_row if dense else judge.nsa_row
    return make_judged(needed(attend), steps, problem, READS.get(part, steps.reads), gold, part.startswith('nsa'))


def make_judged(
    attend: Callable[..., Tensor], steps: Steps, problem: Problem, reads: Sequence[str], gold: judge.Row, typical: bool
) -> tuple[Call, list[Tensor]]:
    """Return a forward with outputs `[N, L, HQ, DV]`, whose facts come from `judge.judge`, and the tensors it reads."""
    changes = [(name, steps.lay_gates if name == 'gates' else steps.layout) for name in reads]
    leaves = [leaf for name, change in changes for leaf in problem.leaves(change, [name])]
    unlay = steps.unlay

    def forward() -> Tensor:
        return unlay(attend(*leaves))

    return Call(forward, partial(judge.judge, problem, forward, leaves, gold, typical=typical)), leaves


def select_blocks(select: Callable[..., Tensor], blocks: Tensor, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return select(q, k, v, blocks)


def make_selection(part: str, steps: Steps, problem: Problem) -> tuple[Call, list[Tensor]]:
    """Return a forward without tensors to differentiate: block selection has no gradient."""
    tensors = problem.leaves(steps.layout, READS['selection'])

    def facts() -> Case:
        blocks = steps.unlay_blocks(needed(steps.choose)(*tensors)[1])
        return judge.judge_blocks(problem, blocks) | {f'union_{count}': union(blocks, count) for count in (4, 16)}

    if part == 'selection':
        return Call(needed(steps.prepare_selection)(*tensors), facts), []
    return Call(lambda: steps.unlay(needed(steps.choose)(*tensors)[0]), facts), []


def union(blocks: Tensor, count: int) -> float:
    """Count the blocks in the union of `count` consecutive queries: the mean of groups at the end of a sequence."""
    groups = min(64, blocks.shape[1] // count)
    # [groups, H, count * n]
    together = blocks[0, -groups * count :].unflatten(0, (groups, count)).transpose(1, 2).flatten(2).sort(-1).values
    new = (together[..., 1:] != together[..., :-1]) & (together[..., 1:] >= 0)
    return float((new.sum(-1) + (together[..., 0] >= 0)).float().mean())


def needed(step: Callable[..., Any] | None) -> Callable[..., Any]:
    if step is None:
        raise ValueError('this implementation lacks the step')
    return step


def attend_in_steps(
    steps: Steps, q: Tensor, k: Tensor, v: Tensor, k_cmp: Tensor, v_cmp: Tensor, gates: Tensor
) -> Tensor:
    compressed, blocks = needed(steps.choose)(q, k_cmp, v_cmp)
    selected = needed(steps.select)(q, k, v, blocks)
    return needed(steps.add)(gates, compressed, selected, needed(steps.window)(q, k, v))


def ours(problem: Problem, design: str | None = None, **options: Any) -> Steps:
    """Return the steps of the package.

    design: of selected attention, None for its own choice. options: further arguments of `nsa`, for the whole.
    """
    from native_sparse_attention import nsa, ops

    shape, where = problem.shape, {'cu_seqlens': problem.borders()} if problem.packed else {}

    def layout(t: Tensor) -> Tensor:
        return rows(t)[None] if problem.packed else t

    settings = make_settings(shape, str(problem.device)) | where
    chosen: dict[str, Any] = {**shape.block_sizes, 'num_selected': shape.num_selected, 'backend': OURS, **where}
    compress = partial(
        ops.compressed_attention,
        block_size=shape.compress_block_size,
        stride=shape.compress_stride,
        seqlen_k=None if problem.packed else problem.size[1],
        backend=OURS,
        **where,
    )

    def choose(q: Tensor, k_cmp: Tensor, v_cmp: Tensor) -> tuple[Tensor, Tensor]:
        out, lse = compress(q, k_cmp, v_cmp)
        return out, ops.select_blocks(q, k_cmp, lse, **chosen)

    def prepare_selection(q: Tensor, k_cmp: Tensor, v_cmp: Tensor) -> Callable[[], Tensor]:
        with torch.no_grad():
            _, lse = compress(q, k_cmp, v_cmp)
        return partial(ops.select_blocks, q, k_cmp, lse, **chosen)

    # `benchmarks.compare` measures packages without this argument, too.
    designs = {} if design is None else {'_design': design}
    select = partial(ops.selected_attention, block_size=problem.block_size, backend=OURS, **designs, **where)
    window = partial(ops.window_attention, window_size=shape.window_size, backend=OURS, **where)
    return Steps(
        layout=layout,
        unlay=problem.in_sequences,
        lay_blocks=layout,
        unlay_blocks=lambda blocks: blocks.view(*problem.size, *blocks.shape[2:]),
        lay_gates=layout,
        compress=lambda *tensors: compress(*tensors)[0],
        choose=choose,
        prepare_selection=prepare_selection,
        select=lambda *tensors: select(*tensors)[0],
        window=lambda *tensors: window(*tensors)[0],
        add=partial(ops.gated_sum, backend=OURS),
        whole=partial(nsa, **{**settings, 'backend': OURS, **options}),
    )


def make_steps(part: str, backend: str, problem: Problem) -> Steps:
    """Return the steps of another implementation; those of PyTorch serve the given part only."""
    match backend:
        case 'flash' if part == 'window':
            return Steps(rows, problem.in_sequences, window=peers.flash_window(problem))
        case 'cudnn' | 'flash':
            return dense(backend, problem)
        case 'flex':
            return Steps(heads_first, heads_first, window=flex_window(problem))
        case _:
            return peers.make_steps(backend, problem)


def dense(backend: str, problem: Problem) -> Steps:
    """Return dense attention of PyTorch, by cuDNN or FlashAttention-2."""
    whole = peers.dense_attention(backend, problem.device.type, is_causal=True, enable_gqa=True)
    return Steps(heads_first, heads_first, whole=whole, reads=('q', 'k', 'v'))


def make_dense(problem: Problem) -> Forward:
    """Return the forward of dense attention, by cuDNN on a GPU, and its inputs."""
    steps = dense(CUDNN, problem)
    leaves, whole = problem.leaves(steps.layout), needed(steps.whole)
    return lambda: heads_first(whole(*leaves)), leaves


def flex_window(problem: Problem) -> Callable[..., Tensor]:
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    (_, length), size, on_gpu = problem.size, problem.shape.window, problem.device.type == 'cuda'
    # Compile for this length alone, without a limit on the number of lengths.
    torch._dynamo.reset()
    attend = torch.compile(flex_attention, dynamic=False)

    def near(b: Tensor, h: Tensor, token: Tensor, key: Tensor) -> Tensor:
        return (token >= key) & (token - key < size)

    mask = create_block_mask(near, None, None, length, length, device=str(problem.device), _compile=on_gpu)
    return lambda q, k, v: attend(q, k, v, block_mask=mask, enable_gqa=True)


class Given(nn.Module):
    """Stand-in for a projection that takes no time: returns `out`, or its input if that is None."""

    def __init__(self, projection: nn.Linear, out: Tensor | None) -> None:
        super().__init__()
        self.in_features, self.out = projection.in_features, out
        self.weight = nn.Parameter(projection.weight.new_empty(0), requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        return x if self.out is None else self.out


def make_layer(part: str, shape: Shape, backend: str, device: str) -> Forward:
    """Return the layer of ours or of a peer. 'layer-inside': without the projections to_qkv and combine_heads."""
    if backend != OURS:
        peer = PEERS[backend]
        folder = peers.find_folder(peer.file)
        if peer.layer is None or folder is None:
            raise ValueError(f'{peer.repository} has no layer, or is not on PYTHONPATH')
        layer = peer.layer(shape, DIM, folder).to(device, shape.dtype)
        x = make_related(shape, DIM, device)
        return lambda: layer(x), [x, *(p for p in layer.parameters() if p.requires_grad)]
    forward, leaves = make_by_backend('layer', shape, backend, device)
    layer, x = forward.func, forward.args[0]
    with torch.no_grad():
        x.copy_(make_related(shape, x.shape[-1], device))
    if part == 'layer':
        return forward, leaves
    projected = make_related(shape, layer.to_qkv.out_features, device)
    layer.to_qkv, layer.combine_heads = Given(layer.to_qkv, projected), Given(layer.combine_heads, None)
    return forward, [x, projected, *(p for p in layer.parameters() if p.requires_grad)]


def make_related(shape: Shape, width: int, device: str) -> Tensor:
    """Return a leaf `[B, T, width]` whose consecutive tokens correlate by RHO."""
    size = (shape.batch, shape.seqlen, 1, width)
    return normal(size, shape.dtype, torch.Generator(device).manual_seed(0), RHO)[:, :, 0].requires_grad_()


def serves(part: str, backend: str, shape: Shape) -> bool:
    if part in ('layer', 'layer-inside', 'nsa-unrelated') and shape.seqlen > MAX_LAYER:
        return False
    if part == 'nsa' and shape.seqlen * shape.heads > MAX_WHOLE:
        return False
    if backend == OURS:
        return True
    if backend in OTHERS:
        return part in OTHERS[backend] and shape.seqlen <= MAX_DENSE
    peer, group = PEERS[backend], shape.heads // shape.kv_heads
    return part in peer.parts and group <= peer.max_group and shape.seqlen <= MAX_PEER


def make_cases(names: list[str], shapes: list[str], backends: list[str]) -> list[Case]:
    """Keep the cases of a shape and part together, so that a run that is cut short has whole comparisons."""
    shapes = sorted(shapes, key=lambda name: DEFAULT_SHAPES.index(name) if name in DEFAULT_SHAPES else -1)
    return [
        {'op': part, 'shape': shape, 'backend': backend}
        for shape, part, backend in product(shapes, names, backends)
        if serves(part, backend, shape_of(shape))
        # The shape with fewer heads is for the whole, which does not fit with more heads.
        and (shape != FEWER_HEADS or part == 'nsa')
    ]


SUITE = Suite(
    title='Part by part and whole',
    about=(
        'Backend triton is ours, cudnn dense attention of PyTorch, flash dense attention or a window by '
        'FlashAttention-2, flex FlexAttention compiled for each length; the whole of a peer has the window of '
        f'FlashAttention-2. Consecutive tokens correlate by {RHO}.'
    ),
    cases=PARTS,
    backends=(OURS, CUDNN, FLASH, FLEX, *PEERS),
    make_cases=make_cases,
    make_tables=make_tables,
    method=Method(make_call, seconds=0.3, measure=measure_with_kernels),
    shapes=','.join(DEFAULT_SHAPES),
    plots=(Plot('Time of `nsa` over the length', plot_times), Plot('Share of each part', plot_shares, '-shares')),
)
