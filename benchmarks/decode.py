"""How fast is decoding? One token of a layer, beside targets, dense attention and peers; tokens/s of a model.

    python -m benchmarks.decode                                    all cases, and the peers on PYTHONPATH
    python -m benchmarks.decode --missing                          the cases that an earlier run did not reach
    python -m benchmarks.decode --what attention --cases '64k-b*' --peers ''    some cases
    python -m benchmarks.decode --what generate --add              tokens/s of `Transformer.generate`, for that table
    TRITON_INTERPRET=1 python -m benchmarks.decode --device cpu --cases 'tiny*' --context 64 --tokens 8 --out /tmp/x
                                                                   to try the script

Attention: one new token of every row, from append to gated output, as a replay of a CUDA graph, and the host time of
the same call without a graph. φ is a mean (ours) or the default network (ours-mlp); cudnn and flash are dense attention
of PyTorch; peers are those of benchmarks/decode_peers.py, those that are not on PYTHONPATH are listed; copy is the rate
of memory. Each backend has a process of its own. Outputs but dense attention's are held against float32 in two rows;
one that is wrong counts for nothing.

Generate: the model of train_enwik8.py, sparse and dense; flags after `--` are train_enwik8.py's.

Writes <gpu>/decode.md and .json to --out after every case, and at the end .png.
"""

from __future__ import annotations

import argparse
from dataclasses import asdict
from itertools import product

from torch import Tensor

from benchmarks.decode_peers import DECODERS, make_dense, make_peer
from benchmarks.decode_report import COPY, DENSE, LEARNED, OURS, make_tables, plot
from benchmarks.decode_steps import SETTINGS, Copy, Generation, Step, make_generation, make_ours
from benchmarks.peers import find_folder
from benchmarks.runner import Case, Method, Plot, make_parser, measure_itself, run, serve
from benchmarks.shapes import find_names
from benchmarks.training_speed import refuse_decided
from train_enwik8 import PRESETS, Config, UserError, parse

WHAT = ('attention', 'generate')
MODELS = ('sparse', 'dense')
TITLE = 'Decoding'


def make_call(case: Case) -> tuple[Step | Copy | Generation, list[Tensor]]:
    backend, device = case['backend'], case['device']
    if backend == COPY:
        return Copy(device), []
    if case['op'] == 'generate':
        return make_generation(case), []
    shape = SETTINGS[case['shape']].shape
    if backend in DENSE:
        return make_dense(shape, device, backend), []
    if backend in DECODERS:
        return make_peer(backend, shape, device), []
    return make_ours(shape, device, learned=backend == LEARNED), []


def make_attention_cases(names: list[str], backends: list[str], device: str) -> list[Case]:
    """Keep the cases of a setting together, so that a run that is cut short has whole comparisons."""
    return [
        {'op': 'copy', 'shape': COPY, 'backend': COPY, 'device': device},
        *(
            {'op': 'attention', 'shape': name, 'backend': backend, 'device': device}
            for name, backend in product(names, backends)
        ),
    ]


def make_generate_cases(options: argparse.Namespace) -> list[Case]:
    """Return cases of preset base with the flags, sparse and dense."""
    chosen, given = parse(['--preset', 'base', *options.flags])
    refuse_decided(given, {'attention': 'this script'})
    cases = []
    for batch, model in product(map(int, options.batches.split(',')), MODELS):
        config = Config(**{**PRESETS[chosen.preset], **given, 'attention': model})
        cases.append(
            {
                'op': 'generate',
                'shape': f'{options.context} tokens, batch {batch}',
                'backend': model,
                'device': options.device,
                'batch': batch,
                'context': options.context,
                'tokens': options.tokens,
                'config': asdict(config),
            }
        )
    return cases


def main() -> None:
    parser = make_parser(__doc__, case_seconds=90)
    add = parser.add_argument
    add('--what', default=','.join(WHAT), help='(%(default)s)')
    add('--cases', default='*', help='patterns of attention, separated by commas; tiny by name only (%(default)s)')
    add('--backends', default=','.join((OURS, LEARNED, *DENSE)), help='of attention, but peers (%(default)s)')
    add('--peers', default=','.join(DECODERS), help="of these those that can be imported; '' for none (%(default)s)")
    add('--context', type=int, default=2**14, help='tokens before those that generate gives (%(default)s)')
    add('--batches', default='1,16', help='rows of generate (%(default)s)')
    add('--tokens', type=int, default=256, help='by which two calls of generate differ (%(default)s)')
    add('flags', nargs='*', help='of train_enwik8.py')
    options = parser.parse_args()
    if options.worker:
        return serve(lambda case: Method(make_call, 0.3, measure_itself))
    wanted = [name for name in options.peers.split(',') if name]
    names = [name for name in wanted if find_folder(DECODERS[name].file)]
    missing = [DECODERS[name].repository for name in wanted if name not in names]
    cases = []
    if 'attention' in options.what.split(','):
        backends = [*options.backends.split(','), *names]
        cases += make_attention_cases(find_names(SETTINGS, options.cases), backends, options.device)
    if 'generate' in options.what.split(','):
        try:
            cases += make_generate_cases(options)
        except UserError as error:
            raise SystemExit(f'decode: {error}') from None
    run(cases, options, 'decode', TITLE, make_tables, [Plot('Time of a token', plot, op='attention')], missing)


if __name__ == '__main__':
    main()
