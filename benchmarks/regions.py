"""What does block selection cost inside the regions of compressed blocks that a query reads, and what over all of them?

    python -m benchmarks.regions                                     three lengths, a few minutes on a GPU
    TRITON_INTERPRET=1 python -m benchmarks.regions --device cpu --shapes tiny --out /tmp/regions     to try the script

Over all compressed blocks: compressed attention, `select_blocks`, and `chosen_scores` of its blocks. In 16 regions of
64 compressed blocks: selection, and the scores of its blocks. Consecutive tokens correlate as in
`benchmarks.attention`, and 16 consecutive queries read the same regions: the first, the two newest and random others.
Writes <gpu>/regions.md and .json.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor

from benchmarks import report
from benchmarks.runner import Call, Case, Method, make_parser, run, serve
from benchmarks.shapes import RHO, SHAPES, Shape, find_names, make_tensors
from benchmarks.timing import measure_both
from native_sparse_attention import ops
from native_sparse_attention.core.call import Regions, SelectionRules, make_call
from native_sparse_attention.ops.block_selection import triton

REGION_SIZE, NUM_REGIONS = 64, 16
# Consecutive queries that read the same random regions.
NEIGHBOURS = 16
# Parts over all compressed blocks, and in regions.
WHOLE = ('compressed', 'selection', 'scores')
IN_REGIONS = ('selection in regions', 'scores in regions')
# Elements of the random numbers that are drawn at once.
DRAWN = 2**26


def make_regions(shape: Shape, device: str, size: int = REGION_SIZE, count: int = NUM_REGIONS) -> Regions:
    """Draw int32 `[B, T, index_heads, R]`: the first region, the two newest and random others with visible blocks."""
    generator = torch.Generator(device).manual_seed(2)
    region = torch.arange(max(count, -(-shape.num_compressed // size)), device=device)
    shape_of_row = (shape.batch, shape.seqlen, shape.index_heads)
    indices = torch.empty(*shape_of_row, count, dtype=torch.int32, device=device)
    chunk = max(1, DRAWN // (shape.batch * shape.index_heads * len(region) * NEIGHBOURS)) * NEIGHBOURS
    for start in range(0, shape.seqlen, chunk):
        stop = min(start + chunk, shape.seqlen)
        position = torch.arange(start, stop, device=device)[:, None, None]
        visible = ((position + 1 - shape.compress_block_size) // shape.compress_stride + 1).clamp(min=0)
        num_visible = (visible + size - 1) // size
        draws = (shape.batch, -(-(stop - start) // NEIGHBOURS), shape.index_heads, len(region))
        lots = torch.rand(draws, device=device, generator=generator)
        lots = lots.repeat_interleave(NEIGHBOURS, 1)[:, : stop - start]
        lots = lots.masked_fill((region == 0) | (region >= num_visible - 2), 2).masked_fill(region >= num_visible, -1)
        drawn = lots.topk(count, -1)
        found = drawn.indices.masked_fill(drawn.values < 0, len(region)).sort(-1).values
        indices[:, start:stop] = found.masked_fill(found == len(region), -1).int()
    return Regions(indices, size)


def make_part(part: str, shape: Shape, device: str) -> tuple[Call, list[Tensor]]:
    """Return the forward of a part and the tensors to differentiate."""
    tensors = make_tensors(shape, device, ('q', 'k_cmp', 'v_cmp'), RHO)
    q, k_cmp, v_cmp = tensors.values()
    sizes: dict[str, Any] = {'block_size': shape.compress_block_size, 'stride': shape.compress_stride}
    attend = partial(ops.compressed_attention, **sizes, seqlen_k=shape.seqlen, backend='triton')
    if part == 'compressed':
        leaves = [t.requires_grad_() for t in (q, k_cmp, v_cmp)]
        return Call(lambda: attend(*leaves)[0]), leaves
    with torch.no_grad():
        _, lse = attend(q, k_cmp, v_cmp)
    del tensors, v_cmp
    settings: dict[str, Any] = {**shape.block_sizes, 'seqlen_k': shape.seqlen, 'backend': 'triton'}
    if part in WHOLE:
        select = partial(ops.select_blocks, q, k_cmp, lse, num_selected=shape.num_selected, **settings)
        score = partial(ops.chosen_scores, **settings)
    else:
        regions, rules = make_regions(shape, device), SelectionRules(shape.num_selected, 1, 2, 0, share_group=True)
        blocks = (shape.compress_block_size, shape.compress_stride, shape.selection_block_size)
        call, _ = make_call(
            q, k_cmp, None, None, None, None, None, True, None, compress=blocks[:2], seqlen_k=shape.seqlen
        )
        select = partial(triton.select_in_regions, q, k_cmp, lse, regions, blocks, call, rules)
        score = partial(triton.chosen_scores, sizes=blocks, call=call, regions=regions)
    if part.startswith('selection'):
        return Call(select), []
    block_indices = select()
    leaves = [t.requires_grad_() for t in (q, k_cmp, lse)]
    return Call(lambda: score(*leaves, block_indices)), leaves


def make_case(case: Case) -> tuple[Call, list[Tensor]]:
    return make_part(case['op'], SHAPES[case['shape']], case['device'])


def make_tables(rows: list[Case]) -> list[str]:
    names = (*WHOLE, *IN_REGIONS)
    times: dict[str, dict[str, Case]] = {}
    for row in rows:
        times.setdefault(row['shape'], {})[row['op']] = row
    lines = []
    for shape, found in times.items():
        for name in ('forward', 'backward'):
            ms = [found.get(part, {}).get(f'{name}_ms') for part in names]
            notes = {row['note'] for row in found.values() if 'note' in row}
            lines.append([shape, name, *ms, '; '.join(sorted(notes))])
    described = [[shape, SHAPES[shape].described()] for shape in times]
    return [
        f'ms; {NUM_REGIONS} regions of {REGION_SIZE} compressed blocks; a selection has no backward:',
        report.table(('shape', 'pass', *names, ''), lines),
        report.table(('shape', ''), described),
    ]


def main() -> None:
    parser = make_parser(__doc__, case_seconds=200)
    parser.add_argument('--shapes', default='long-64k-q32,long-256k-q32,long-1024k-q32', help='%(default)s')
    parser.add_argument('--parts', default=','.join((*WHOLE, *IN_REGIONS)), help='%(default)s')
    options = parser.parse_args()
    if options.worker:
        return serve(lambda case: Method(make_case, 0.5, measure_both))
    parts, shapes = (options.parts.split(','), find_names(SHAPES, options.shapes))
    cases = [
        {'op': part, 'shape': shape, 'backend': 'triton', 'device': options.device}
        for shape in shapes
        for part in parts
    ]
    run(cases, options, 'regions', 'Block selection in regions', make_tables)


if __name__ == '__main__':
    main()
