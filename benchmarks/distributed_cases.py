"""Cases of `benchmarks.distributed`, of most worth first, and what they must reach."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from benchmarks.runner import Case
from benchmarks.training_speed import make_config

SIZES = (2, 4, 8)
LARGEST = max(SIZES)
# Most tokens of attention on one GPU before all others have run: 2^19 need 74 GiB. Tensors of a rank with more than
# WIDE tokens need int64 offsets, and so other kernels.
LONGEST_ON_ONE, WIDE = 2**19, 2**18
PAPER = {
    'sliding_window_size': 512,
    'compress_block_size': 32,
    'compress_block_sliding_stride': 16,
    'selection_block_size': 64,
    'num_selected_blocks': 16,
    'use_diff_topk': True,
}
TINY = {
    'sliding_window_size': 16,
    'compress_block_size': 8,
    'compress_block_sliding_stride': 4,
    'selection_block_size': 8,
    'num_selected_blocks': 4,
}
# A step of the model on two GPUs, whose losses those of the other layouts must equal.
REFERENCE = {'fsdp': 2}
# Layouts of the model by the number of GPUs; then those from which `benchmarks.scaling_model` predicts them.
MODEL_LAYOUTS: dict[int, tuple[dict[str, int], ...]] = {
    2: (),
    4: ({'cp': 2, 'fsdp': 2}, {'tp': 2, 'cp': 2}),
    8: ({'fsdp': 8}, {'cp': 4, 'fsdp': 2}, {'tp': 2, 'cp': 4}),
}
SIMPLE_LAYOUTS: tuple[dict[str, int], ...] = ({'cp': 2}, {'tp': 2}, {})


@dataclass(frozen=True)
class Target:
    """What a case must reach.

    speedup: least speed over one GPU. over_two: over two GPUs, where one GPU has no speed. memory: greatest share of
    the memory of one GPU. gigabytes: most memory per GPU, in 10^9 bytes.
    """

    speedup: float | None = None
    over_two: float | None = None
    memory: float | None = None
    gigabytes: float | None = None


# By case and number of GPUs.
TARGETS: dict[tuple[str, int], Target] = {
    ('attention, 262,144 tokens', 2): Target(speedup=1.8, memory=0.6),
    ('attention, 262,144 tokens', 4): Target(speedup=3.2),
    ('attention, 524,288 tokens', 4): Target(speedup=3.2),
    ('attention, 524,288 tokens', 8): Target(speedup=6.0, over_two=3.2),
    ('attention, 1,048,576 tokens', 8): Target(gigabytes=80.0),
    ('trainer, rows of 16,384 tokens', 2): Target(speedup=1.85),
}


@dataclass(frozen=True)
class Sizes:
    """Sizes of all cases.

    sequences: names of shapes of attention and their tokens, by the number of GPUs, of most worth first. trainer:
    flags, length, and tokens per GPU. layer: tokens of one layer. heads: of the layer and the model. model: length of
    its rows, and its settings beside heads.
    """

    sequences: dict[int, tuple[tuple[str, int], ...]]
    trainer: tuple[list[str], int, int]
    layer: int
    heads: dict[str, Any]
    model: tuple[int, dict[str, Any]]
    dtype: str


_LONG = {2**power: (f'long-{2**power // 1024}k-h4', 2**power) for power in (17, 18, 19, 20)}
SHAPES = {
    'full': Sizes(
        {
            2: (_LONG[2**18], _LONG[2**17]),
            4: (_LONG[2**18], _LONG[2**19], _LONG[2**17]),
            8: (_LONG[2**19], _LONG[2**20], _LONG[2**18]),
        },
        ([], 2**14, 2**16),
        2**15,
        {'dim': 2048, 'dim_head': 64, 'heads': 32, 'kv_heads': 8, 'sparse_attn_kwargs': PAPER},
        (2**17, {'depth': 16, 'ff_expansion_factor': 6.0}),
        'bfloat16',
    ),
    'tiny': Sizes(
        {
            2: (('tiny', 96), ('tiny', 64)),
            4: (('tiny', 96), ('tiny', 128), ('tiny', 64)),
            8: (('tiny', 128), ('tiny', 160), ('tiny', 96)),
        },
        (['--preset', 'cpu', '--dim', '32'], 48, 96),
        64,
        {'dim': 32, 'dim_head': 8, 'heads': 8, 'kv_heads': 4, 'sparse_attn_kwargs': TINY},
        (96, {'depth': 2}),
        'float32',
    ),
}


def make_cases(sizes: Sizes, device: str, gpus: int, data: str) -> list[Case]:
    """Return the cases, of most worth first. Measurements come before profiles, which slow down what follows."""
    others = [count for count in SIZES if count < gpus]
    common = {'device': device, 'backend': 'auto', 'graph': False, 'data': data, 'dtype': sizes.dtype}

    def case(step: str, name: str, layout: dict[str, int], tokens: int, **more: Any) -> Case:
        count = 1
        for ranks in layout.values():
            count *= ranks
        return {'op': name, 'gpus': count, 'layout': layout, 'step': step, 'tokens': tokens, **more, **common}

    def attention(shape: str, tokens: int, count: int, **more: Any) -> Case:
        layout = {'cp': count} if count > 1 else {}
        return case('attention', f'attention, {tokens:,} tokens', layout, tokens, shape=shape, **more)

    def trainer(count: int, **more: Any) -> Case:
        flags, length, tokens = sizes.trainer
        config = asdict(make_config(flags, 'sparse', length, tokens * count))
        layout = {'dp': count} if count > 1 else {}
        return case('trainer', f'trainer, rows of {length:,} tokens', layout, tokens * count, config=config, **more)

    def layer(count: int, **more: Any) -> Case:
        layout = {'tp': count} if count > 1 else {}
        name = f'layer, {sizes.layer:,} tokens'
        return case('layer', name, layout, sizes.layer, model={**sizes.heads, 'depth': 1}, **more)

    def model(layout: dict[str, int]) -> Case:
        length, settings = sizes.model
        name, tokens = f'model, rows of {length:,} tokens', num_rows(layout) * length
        return case('model', name, layout, tokens, model={**sizes.heads, **settings}, length=length)

    sequences = sizes.sequences[gpus]
    on_one = [attention(*sequence, 1) for sequence in sequences]
    cases = []
    for sequence, one in zip(sequences, on_one, strict=True):
        cases += [attention(*sequence, gpus), *([one] if one['tokens'] <= LONGEST_ON_ONE else [])]
    if gpus < LARGEST:
        counts = [1, *others, gpus]
        cases += [trainer(count) for count in counts]
        cases += [{**trainer(count), 'graph': True} for count in counts if device == 'cuda']
        cases += [layer(count) for count in counts]
    cases += [model(layout) for layout in (*MODEL_LAYOUTS[gpus], REFERENCE)]
    cases += [attention(*sequence, count) for count in others for sequence in sequences]
    cases += [model(layout) for layout in SIMPLE_LAYOUTS]
    cases += [attention(*sequence, gpus, profile=True) for sequence in sequences]
    if gpus < LARGEST:
        cases += [trainer(gpus, profile=True), layer(gpus, profile=True)]
    cases.append({**on_one[0], 'profile': True})
    cases += [attention(*sequence, count, profile=True) for count in reversed(others) for sequence in sequences]
    return [*cases, *(one for one in on_one if one['tokens'] > LONGEST_ON_ONE)]


def to_warm(cases: Sequence[Case]) -> list[Case]:
    """Return cases that compile the kernels of all, those of attention first, the longest first.

    Kernels depend on what is divided, on the number of rows and their length, and on whether offsets are wide; those of
    a model are compiled with one layer of it. Of the cases that need the same kernels, the one on the fewest GPUs
    compiles them.
    """
    found: dict[Any, Case] = {}
    for case in sorted(cases, key=lambda case: case['gpus']):
        if case['step'] == 'attention' and not case['layout'] and case['tokens'] > LONGEST_ON_ONE:
            continue
        divided = sorted(case['layout'].keys() - {'dp', 'fsdp'})
        key, warm = (case['step'], *divided), {**case, 'warm': True, 'profile': False, 'graph': False}
        if case['step'] == 'attention':
            key += (case['tokens'] / case['gpus'] > WIDE if divided else case['tokens'],)
        elif case['step'] == 'model':
            key += (rows_per_rank(case['layout']),)
            warm['model'] = {**case['model'], 'depth': 1}
        found.setdefault(key, warm)
    return sorted(found.values(), key=lambda case: (case['step'] != 'attention', -case['tokens'] / case['gpus']))


def num_rows(layout: dict[str, int]) -> int:
    """Return the rows of a step of the model: two, or one for each data rank."""
    return max(REFERENCE['fsdp'], layout.get('fsdp', 1))


def rows_per_rank(layout: dict[str, int]) -> int:
    return num_rows(layout) // layout.get('fsdp', 1)


def name_of(layout: dict[str, int]) -> str:
    return ' x '.join(f'{name} {ranks}' for name, ranks in layout.items()) or 'one GPU'
