"""What does the compression network φ add to a decoding step, beside a mean?

    python -m benchmarks.decode_phi                          within a minute on a GPU
    TRITON_INTERPRET=1 python -m benchmarks.decode_phi --device cpu --cases tiny-b1 --out /tmp/x    to try the script

One new token of every row, from append to gated output, in steps that complete a compressed block of every row and in
steps that complete none: ms of a replay of a CUDA graph, and the host's µs of a call without a graph, which does not
depend on that. φ is a mean, the default network (`CompressMLP`) whose layers the kernels compute, or the same network
called as a module. Outputs are held against float32 in two rows.

Floor: φ's weights at the rate of a copy, which counts bytes read and written. Writes <gpu>/decode_phi.md and .json.
"""

from __future__ import annotations

from dataclasses import replace

from torch import Tensor

from benchmarks import report
from benchmarks.decode_steps import SETTINGS, Copy, Step, make_ours
from benchmarks.report import ratio
from benchmarks.runner import Case, Method, make_parser, measure_itself, run, serve
from benchmarks.shapes import Shape, find_names

# φ by name: whether it is learned, and whether it is called.
NETWORKS = {'mean': (False, False), 'mlp': (True, False), 'mlp, called': (True, True)}
STEPS = ('no block', 'block')
# ms that φ may add to a step without a new block, and beyond the reading of its weights to one with it.
REACH = 0.01


def make_step(shape: Shape, device: str, network: str, step: str) -> Step:
    """The last token of the shapes of `benchmarks.decode` completes a block; the one before it completes none."""
    assert (shape.seqlen - shape.compress_block_size) % shape.compress_stride == 0
    assert shape.compress_stride > 1
    shape = shape if step == 'block' else replace(shape, seqlen=shape.seqlen - 1)
    return make_ours(shape, device, *NETWORKS[network])


def weight_bytes(shape: Shape) -> int:
    """Bytes of the default networks for keys and for values."""
    sizes = [shape.compress_block_size * dim for dim in (shape.head_dim, shape.value_dim)]
    dims = (shape.head_dim, shape.value_dim)
    count = sum(size * size + size + size * dim + dim for size, dim in zip(sizes, dims, strict=True))
    return count * shape.dtype.itemsize


class Steps:
    """All steps of a shape, one after the other."""

    def __init__(self, shape: Shape, device: str) -> None:
        self.shape, self.device = shape, device

    def __call__(self) -> Tensor:
        return make_step(self.shape, self.device, 'mlp', 'block')()

    def measure(self, device: str, seconds: float) -> Case:
        """Return by network and kind of step what `Step.measure` returns; bytes, and ms of a copy of so many."""
        found = {
            f'{network}, {step}': make_step(self.shape, device, network, step).measure(device, seconds)
            for network in NETWORKS
            for step in STEPS
        }
        copy = Copy(device).measure(device, seconds)
        size = weight_bytes(self.shape)
        return {'steps': found, 'weight_bytes': size, 'read_ms': copy['forward_ms'] * size / copy['bytes']}


def make_call(case: Case) -> tuple[Steps, list[Tensor]]:
    return Steps(SETTINGS[case['shape']].shape, case['device']), []


def make_tables(rows: list[Case]) -> list[str]:
    ms, added, host = [], [], []
    for row in rows:
        steps = row.get('steps')
        if steps is None:
            ms.append([row['shape'], *[None] * 6, row.get('note', '')])
            continue
        times = {name: None if found.get('wrong') else found['forward_ms'] for name, found in steps.items()}
        notes = [f'{name} {found["note"]}' for name, found in steps.items() if 'note' in found]
        ms.append([row['shape'], *times.values(), '; '.join(notes)])
        for name in [*NETWORKS][1:]:
            more = [_difference(times[f'{name}, {step}'], times[f'mean, {step}']) for step in STEPS]
            limits = (REACH, row['read_ms'] + REACH)
            verdicts = [_judged(found, limit) for found, limit in zip(more, limits, strict=True)]
            added.append([row['shape'], name, more[0], verdicts[0], more[1], row['read_ms'], verdicts[1]])
        host.append([row['shape'], *(steps[f'{name}, no block']['host_us'] for name in NETWORKS)])
    described = [[row['shape'], SETTINGS[row['shape']].shape.described()] for row in rows]
    sizes = sorted({row['weight_bytes'] for row in rows if 'weight_bytes' in row})
    return [
        f'ms of a replay of a CUDA graph; φ has {" or ".join(f"{size / 2**20:.0f} MiB" for size in sizes)} of weights:',
        report.table(('case', *(f'{name}, {step}' for name in NETWORKS for step in STEPS), ''), ms),
        f'ms that φ adds to the step with a mean. Reach: {REACH} without a new block; with one, {REACH} more than the '
        f'weights at the rate of a copy.',
        report.table(('case', 'φ', 'no block', 'verdict', 'block', 'weights', 'verdict'), added),
        'µs of the host for a call without a graph:',
        report.table(('case', *NETWORKS), host),
        report.table(('case', ''), described),
    ]


def _difference(a: float | None, b: float | None) -> float | None:
    return None if a is None or b is None else a - b


def _judged(value: float | None, limit: float) -> str | None:
    if value is None:
        return None
    return 'met' if value <= limit else f'{ratio(value, limit):.2f} times'


def main() -> None:
    parser = make_parser(__doc__, case_seconds=60)
    parser.add_argument('--cases', default='64k-b1,64k-b8,64k-b32', help='of benchmarks.decode (%(default)s)')
    options = parser.parse_args()
    if options.worker:
        return serve(lambda case: Method(make_call, 0.1, measure_itself))
    names = find_names(SETTINGS, options.cases)
    cases = [{'op': 'phi', 'shape': name, 'backend': 'triton', 'device': options.device} for name in names]
    run(cases, options, 'decode_phi', 'φ of a decoding step', make_tables)


if __name__ == '__main__':
    main()
