"""Settings of a run and the command line of train_enwik8.py."""

from __future__ import annotations

import argparse
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, NoReturn

import torch

from native_sparse_attention.nn.transformer import SHAPE_SETTINGS
from trainer.console import UserError


def flag(default: Any, text: str, least: float | None = None, **more: Any) -> Any:
    return field(default=default, metadata={'help': text, 'least': least, **more})


@dataclass(frozen=True)
class Config:
    """Settings of a run, saved with it and fixed. Every field is a flag; the defaults are preset `base`."""

    attention: str = flag('sparse', 'the one thing in which the two models differ', choices=('sparse', 'dense'))
    dim: int = flag(512, 'width of the model', 1, model=True)
    depth: int = flag(6, 'layers', 1, model=True)
    heads: int = flag(8, 'query heads', 1, model=True)
    kv_heads: int = flag(4, 'key/value heads', 1, model=True)
    dim_head: int = flag(64, 'size of a head', 1, model=True)
    ff_expansion_factor: float = flag(4.0, 'hidden size of the feed-forward networks over --dim', 0, model=True)
    tie_embeddings: bool = flag(False, 'the output head is the token embedding', model=True)
    sliding_window_size: int = flag(64, 'tokens that the window branch reads', 1, sparse=True)
    compress_block_size: int = flag(16, 'length of a compressed block', 1, sparse=True)
    compress_block_sliding_stride: int = flag(8, 'distance between starts of compressed blocks', 1, sparse=True)
    selection_block_size: int = flag(16, 'length of a block that can be selected', 1, sparse=True)
    num_selected_blocks: int = flag(8, 'blocks that a query reads, forced ones included', 0, sparse=True)
    num_init_blocks: int = flag(1, 'forced blocks at the start', 0, sparse=True)
    num_local_blocks: int = flag(2, "forced blocks up to the query's own", 0, sparse=True)
    compress_mlp_expand_factor: float = flag(
        1.0, 'hidden size of the networks of blocks over a block', 0.01, sparse=True
    )
    merge_window: bool = flag(
        False, 'selected blocks and window in one softmax, a gate for the compressed branch alone', sparse=True
    )
    select_before_window: bool = flag(False, 'select blocks before the window alone, with --merge-window', sparse=True)
    output_gate: bool = flag(False, 'a gate per head on the whole sparse output, with --merge-window', sparse=True)
    num_compressed_mem_kv: int = flag(1, 'learned key/value pairs before the compressed ones', 0, sparse=True)
    qk_norm: bool = flag(False, 'RMSNorm of queries and keys, in dense attention too', sparse=True)
    use_diff_topk: bool = flag(True, 'teach the compressed branch what was worth selecting', sparse=True)
    block_loss: float = flag(0.0, 'weight of the loss that teaches block scores the mass of full attention', 0)
    seq_len: int = flag(1024, 'bytes of context', 1)
    batch: int = flag(16, 'sequences in a forward', 1)
    grad_accum: int = flag(1, 'forwards in a step', 1)
    steps: int = flag(20_000, 'optimizer steps', 1)
    lr: float = flag(6e-4, 'learning rate after the warm-up', 0)
    min_lr: float = flag(6e-5, 'learning rate at the end of the cosine', 0)
    warmup: int = flag(500, 'steps of linear warm-up', 0)
    weight_decay: float = flag(0.1, 'on weight matrices only', 0)
    beta1: float = flag(0.9, 'of AdamW', 0)
    beta2: float = flag(0.95, 'of AdamW', 0)
    clip: float = flag(1.0, 'largest norm of the gradient', 0)
    amp: bool = flag(True, 'bfloat16 autocast, on GPUs')
    threads: int = flag(0, 'of the CPU, 0: as many as torch takes; small models are hardly faster with more than 1', 0)
    seed: int = flag(0, 'of the weights, the order of the data and the samples', 0)
    log_every: int = flag(10, 'steps between lines of the log', 1)
    eval_every: int = flag(2000, 'steps between validations; there are some at earlier steps, too', 1)
    eval_bytes: int = flag(0, 'validate and test on so many bytes at the start of each split; 0: all', 0)
    save_every: int = flag(1000, 'steps between checkpoints', 1)
    sample_every: int = flag(2000, 'steps between samples; the last step writes one too', 1)
    sample_bytes: int = flag(512, 'length of a sample', 1)
    prompt_bytes: int = flag(128, 'bytes at the start of the validation split that a sample continues', 1)
    temperature: float = flag(1.0, 'of a sample', 0)
    top_p: float = flag(0.95, 'share of the probability that a sample draws from', 0)


PRESETS: dict[str, dict[str, Any]] = {
    'cpu': {
        'dim': 96, 'depth': 2, 'heads': 2, 'kv_heads': 1, 'dim_head': 32, 'sliding_window_size': 32,
        'compress_block_size': 8, 'compress_block_sliding_stride': 4, 'selection_block_size': 8,
        'num_selected_blocks': 5, 'compress_mlp_expand_factor': 0.25, 'seq_len': 128, 'batch': 8, 'steps': 4000,
        'lr': 5e-3, 'min_lr': 1e-4, 'warmup': 100, 'threads': 1, 'eval_every': 1000, 'eval_bytes': 128 * 1024,
        'save_every': 250, 'sample_every': 1000, 'sample_bytes': 256, 'prompt_bytes': 64,
    },
    'base': {},
    'long': {
        'sliding_window_size': 512, 'compress_block_size': 32, 'compress_block_sliding_stride': 16,
        'selection_block_size': 64, 'num_selected_blocks': 16, 'compress_mlp_expand_factor': 0.125,
        'merge_window': True, 'select_before_window': True, 'output_gate': True, 'qk_norm': True, 'block_loss': 0.1,
        'seq_len': 16_384, 'batch': 4, 'steps': 4580, 'lr': 1e-3, 'min_lr': 1e-4, 'warmup': 100, 'eval_every': 1000,
        'save_every': 250, 'sample_every': 1000, 'prompt_bytes': 4096,
    },
}  # fmt: skip


# Settings that a dense model does not have.
SPARSE_ONLY = {*(f.name for f in fields(Config) if 'sparse' in f.metadata), 'block_loss'} - {*SHAPE_SETTINGS}
# The options that act together with these two, which train nothing.
WITH_SAMPLE = {'sample', 'prompt', 'tokens', 'backend', 'device', 'temperature', 'top_p', 'seed', 'traceback'}
WITH_COMPARE = {'compare', 'runs_dir', 'traceback'}
# Options that act in training alone.
NOT_WITH_CHECK_DECODE = {'resume', 'compile', 'graph', 'wandb'}


class Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise UserError(f'{message} (see --help)')


def parse(argv: list[str] | None, description: str = '') -> tuple[argparse.Namespace, dict[str, Any]]:
    """Return the options of this call, and the fields of `Config` that it names.

    Raises:
        UserError: a flag is unknown, or its value is out of range.
    """
    parser = Parser('train_enwik8.py', description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument_group('this call').add_argument
    add('--preset', choices=PRESETS, help='the values that the flags below change (base on a GPU, else cpu)')
    add('--data', help="a file (.gz, .zip or raw), a folder, or 'stdlib', the sources of Python's library (enwik8)")
    add('--name', help='of the run (preset, attention and text)')
    add('--runs-dir', type=Path, default=Path('runs'), help='where runs are kept (%(default)s)')
    add('--resume', action='store_true', help='continue the run from its checkpoint, with its settings')
    add('--check-decode', action='store_true', help='train nothing: compare decoding with the full forward')
    add('--sample', type=Path, metavar='FOLDER', help='train nothing: print text by the model of runs/<name>')
    add('--compare', type=Path, nargs='+', metavar='RUN', help='train nothing: table and picture of these runs/<name>')
    add('--prompt', help='what that text continues (a line break)')
    add('--tokens', type=int, metavar='N', help='bytes of that text (512)')
    add('--backend', default='auto', help='of sparse attention: auto, triton, flex, eager (%(default)s)')
    add('--device', default='cuda' if torch.cuda.is_available() else 'cpu', help='cuda or cpu (%(default)s)')
    add('--dp', type=int, metavar='N', help='data ranks, which divide each batch (default: what the others leave)')
    add('--cp', type=int, default=1, metavar='N', help='context ranks, which divide each sequence (%(default)s)')
    add('--tp', type=int, default=1, metavar='N', help='tensor ranks, which divide each layer (%(default)s)')
    add('--compile', action='store_true', help='through torch.compile')
    add('--graph', action=argparse.BooleanOptionalAction, default=True, help='replay steps as a CUDA graph, on GPUs')
    add('--unpack-gib', type=float, default=4.0, metavar='X', help='largest text in an archive (%(default)s)')
    add('--traceback', action='store_true', help='show the whole error')
    add('--wandb', action='store_true', help='log to Weights & Biases too')
    add = parser.add_argument_group('the run').add_argument
    for f in fields(Config):
        values = {preset: changes.get(f.name, f.default) for preset, changes in PRESETS.items()}
        differ = len(set(values.values())) > 1
        shown = ', '.join(f'{preset} {value}' for preset, value in values.items()) if differ else f.default
        kind: dict[str, Any] = {'type': type(f.default), 'choices': f.metadata.get('choices')}
        if isinstance(f.default, bool):
            kind = {'action': argparse.BooleanOptionalAction}
        elif not kind['choices']:
            kind['metavar'] = 'N' if isinstance(f.default, int) else 'X'
        add(spelled(f.name), default=argparse.SUPPRESS, help=f'{f.metadata["help"]} ({shown})', **kind)
    options = parser.parse_args(argv)
    if options.sample is None and (options.prompt is not None or options.tokens is not None):
        raise UserError('--prompt and --tokens: need --sample, the run that writes')
    changed = {name: value for name, value in vars(options).items() if value != parser.get_default(name)}
    for mode, ignored, why in (
        ('sample', changed.keys() - WITH_SAMPLE, 'takes the run as it is'),
        ('compare', changed.keys() - WITH_COMPARE, 'trains nothing'),
        ('check_decode', changed.keys() & NOT_WITH_CHECK_DECODE, 'trains nothing'),
    ):
        if vars(options)[mode] and ignored:
            flags = ', '.join(spelled(name, changed[name]) for name in sorted(ignored))
            raise UserError(f'{flags}: not with {spelled(mode)}, which {why}')
    if not options.unpack_gib > 0:
        raise UserError(f'--unpack-gib {options.unpack_gib}: must be more than 0')
    given = {f.name: vars(options).pop(f.name) for f in fields(Config) if f.name in options}
    for f in fields(Config):
        least = f.metadata['least']
        if f.name in given and least is not None and not given[f.name] >= least:
            raise UserError(f'{spelled(f.name)} {given[f.name]}: must be at least {least}')
    # A run that exists keeps its settings, and may have been started with such flags by an older version.
    if given.get('attention') == 'dense' and not (options.resume or options.check_decode):
        for name, value in given.items():
            if name in SPARSE_ONLY:
                shown = spelled(name, value) + ('' if isinstance(value, bool) else f' {value}')
                raise UserError(f'{shown}: must be left out with --attention dense')
    return options, given


def spelled(name: str, value: Any = None) -> str:
    return ('--no-' if value is False else '--') + name.replace('_', '-')
