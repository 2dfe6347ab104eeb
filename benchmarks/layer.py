"""How fast is the layer, part by part and whole, from 4k to 1M tokens? Its targets, dense attention, every peer.

    python -m benchmarks.layer --missing                                  everything, and again until all has been run
    python -m benchmarks.layer --shapes paper-64k-h4                      what has targets
    python -m benchmarks.layer --parts 'nsa*' --backends triton,cudnn     some of it
    TRITON_INTERPRET=1 python -m benchmarks.layer --device cpu --shapes tiny --out /tmp/results     to try the script

Parts: compressed attention, it and the choice of blocks together, the choice, selected attention (of the blocks that
the implementation itself chose), the window, the gated sum, `nsa`, and `SparseAttention`, whole and without its two
projections (layer-inside). Neighbours of the inputs resemble each other (`make_tensors`), but not in nsa-unrelated.

Backends: triton is ours; cudnn is dense attention of PyTorch by cuDNN; flash is dense attention of PyTorch by
FlashAttention-2, or the window of FlashAttention-2; flex is FlexAttention, compiled for each length; and the
repositories of benchmarks/peers.py that are on PYTHONPATH, whose whole has the window of FlashAttention-2. Each has a
process of its own. A few rows of all outputs but the layers' are held against float32; those that are wrong count for
nothing.

Writes <gpu>/parts.md and .json to --out after every case, at the end -parts.png (time over length) and
-parts-shares.png (share of each part). --budget bounds a call; the next one with --missing goes on where it stopped.
"""

from __future__ import annotations

import argparse
from functools import partial
from itertools import product
from typing import Any

from torch import Tensor

from benchmarks import peers, report
from benchmarks.layer_report import FEWER_HEADS, make_tables, plot_shares, plot_times
from benchmarks.parts import CUDNN, FLASH, FLEX, OTHERS, OURS, PARTS, make_call, shape_of
from benchmarks.peers import PEERS
from benchmarks.runner import Case, add_run_arguments, run, serve
from benchmarks.shapes import PAPER, SHAPES, Shape, find_names
from benchmarks.timing import measure_with_kernels

# What has targets, then what is compared, then what completes the curves over the length.
DEFAULT_SHAPES = (
    'paper-64k-h4', 'paper-8k-h4', 'paper-32k-h16', 'paper-32k-h64', 'head-64', 'trainer', 'short-4k-h4',
    'paper-16k-h4', 'paper-32k-h4', 'long-128k-h4', 'long-256k-h4', 'long-512k-h4', 'long-1024k-h4', FEWER_HEADS,
)  # fmt: skip
# Longer, dense attention takes minutes.
MAX_DENSE = 2**17
MAX_LAYER = 2**16
# The tensors of more do not fit on one GPU.
MAX_WHOLE = 2**20 * 32
TITLE = 'Part by part and whole'


def serves(part: str, backend: str, shape: Shape, longest_peer: int) -> bool:
    if part in ('layer', 'layer-inside', 'nsa-unrelated') and shape.seqlen > MAX_LAYER:
        return False
    if part == 'nsa' and shape.seqlen * shape.heads > MAX_WHOLE:
        return False
    if backend == OURS:
        return True
    if backend in OTHERS:
        return part in OTHERS[backend] and shape.seqlen <= MAX_DENSE
    peer, group = PEERS[backend], shape.heads // shape.kv_heads
    return part in peer.parts and group <= peer.max_group and shape.seqlen <= longest_peer


def make_cases(shapes: str, parts: str, backends: list[str], device: str, longest_peer: int) -> list[Case]:
    """Those of a shape and part stand together, so that a run that is cut short has whole comparisons."""
    names = find_names(SHAPES, shapes)
    names.sort(key=lambda name: DEFAULT_SHAPES.index(name) if name in DEFAULT_SHAPES else -1)
    return [
        {'op': part, 'shape': name, 'backend': backend, 'device': device}
        for name, part, backend in product(names, find_names(PARTS, parts), backends)
        if serves(part, backend, shape_of(name), longest_peer)
        # The shape with fewer heads is for the whole, which with more does not fit.
        and (name != FEWER_HEADS or part == 'nsa')
    ]


def make_facts(call: Any, leaves: list[Tensor], device: str) -> Case:
    return call.facts()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_run_arguments(parser, case_seconds=90)
    add = parser.add_argument
    add('--shapes', default=','.join(DEFAULT_SHAPES), help='patterns, separated by commas (%(default)s)')
    add('--parts', default='*', help='patterns (%(default)s)')
    everything = (OURS, CUDNN, FLASH, FLEX, *PEERS)
    add('--backends', default=','.join(everything), help='of peers those that can be imported (%(default)s)')
    add('--longest-peer', type=int, default=2**17, help='tokens; longer, several break their process (%(default)s)')
    options = parser.parse_args()
    if options.worker:
        return serve(make_call, seconds=0.3, make_facts=make_facts, measure=measure_with_kernels)
    wanted = options.backends.split(',')
    missing = [name for name in wanted if name in PEERS and not peers.find_folder(PEERS[name].file)]
    found = [name for name in wanted if name not in missing]
    cases = make_cases(options.shapes, options.parts, found, options.device, options.longest_peer)
    tables = partial(make_tables, missing=[PEERS[name].repository for name in missing])
    where, rows = run(cases, options, 'parts', TITLE, tables)
    links = []
    for suffix, plot, text in (
        ('', plot_times, '`nsa` over the length'),
        ('-shares', plot_shares, 'Share of each part'),
    ):
        image = report.path(options.out, where, f'parts{suffix}', '.png')
        plot(image, rows, f'{text}, {where["gpu"]}, {PAPER.described().split("tokens, ")[1]}')
        links.append(f'![{text}]({image.name})')
    report.write(options.out, where, 'parts', TITLE, [*tables(rows), *links], rows)


if __name__ == '__main__':
    main()
