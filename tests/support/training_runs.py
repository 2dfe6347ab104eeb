"""Small runs of the trainer, and comparisons of what they write."""

import json
import random
from pathlib import Path
from typing import Any

import torch
from torch.distributed import checkpoint
from torch.distributed.checkpoint import FileSystemReader

import train_enwik8
from trainer.config import SPARSE_ONLY
from trainer.tensors import without_warnings

TINY = {
    'dim': 16, 'depth': 1, 'heads': 2, 'kv_heads': 1, 'dim_head': 8, 'sliding_window_size': 8, 'compress_block_size': 4,
    'compress_block_sliding_stride': 2, 'selection_block_size': 4, 'num_selected_blocks': 4, 'seq_len': 16, 'batch': 2,
    'grad_accum': 2, 'steps': 12, 'lr': 1e-2, 'warmup': 3, 'log_every': 3, 'eval_every': 5, 'eval_bytes': 50,
    'save_every': 4, 'sample_every': 6, 'sample_bytes': 8, 'prompt_bytes': 10,
}  # fmt: skip


def write_words(folder: Path) -> Path:
    """Write a text of 2,000 bytes, and return its path."""
    path = folder / 'words.txt'
    path.write_bytes(bytes(random.Random(0).choices(b'some of the words ', k=2000)))
    return path


def command(text: Path, runs: Path, *more: str, **settings: Any) -> list[str]:
    is_dense = 'dense' in (settings.get('attention'), *more)
    tiny = {name: value for name, value in TINY.items() if not (is_dense and name in SPARSE_ONLY)}
    flags = [f'{train_enwik8.spelled(name)}={value}' for name, value in {**tiny, **settings}.items()]
    return ['--data', str(text), '--runs-dir', str(runs), '--device', 'cpu', '--preset', 'cpu', *flags, *more]


def rows(folder: Path, timeless: bool = True) -> list[dict[str, Any]]:
    read = [json.loads(line) for line in (folder / 'log.jsonl').read_text().splitlines()]
    return [{k: v for k, v in row.items() if k not in ('tokens_per_s', 'seconds') or not timeless} for row in read]


def flat(value: Any, name: str = '') -> dict[str, Any]:
    if isinstance(value, dict):
        return {k: v for key, entry in value.items() for k, v in flat(entry, f'{name}.{key}').items()}
    if isinstance(value, list):
        return flat(dict(enumerate(value)), name)
    return {name: value}


def tensors(folder: Path) -> dict[str, torch.Tensor]:
    """Return the weights and the state of the optimizer that the checkpoint of a run names."""
    path = folder / torch.load(folder / 'checkpoint.pt', weights_only=True)['tensors']
    stored: dict[str, Any] = dict(FileSystemReader(path).read_metadata().state_dict_metadata)
    state = {name: torch.empty(found.size, dtype=found.properties.dtype) for name, found in stored.items()}
    with without_warnings():
        checkpoint.load(state, checkpoint_id=path, no_dist=True)
    return state


def assert_same_run(one: Path, other: Path) -> None:
    """Assert equal bits of weights, optimizer, random states, log and samples."""
    a, b = (flat(torch.load(run / 'checkpoint.pt', weights_only=True)) | tensors(run) for run in (one, other))
    assert a.keys() == b.keys()
    for name in a:
        if not name.endswith(('tokens_per_s', 'seconds')):
            equal = torch.equal(a[name], b[name]) if isinstance(a[name], torch.Tensor) else a[name] == b[name]
            assert equal, name
    assert rows(one) == rows(other)
    samples = [sorted(p.name for p in folder.glob('sample-*')) for folder in (one, other)]
    assert samples[0] == samples[1]
    for name in samples[0]:
        body = [(folder / name).read_text().split('\n', 1)[1] for folder in (one, other)]
        assert body[0] == body[1]


def contents(folder: Path) -> dict[str, bytes]:
    return {str(p.relative_to(folder)): p.read_bytes() for p in folder.rglob('*') if p.is_file()}
