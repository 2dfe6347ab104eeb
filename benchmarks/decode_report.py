"""Tables of `benchmarks.decode`: targets, comparisons, bytes to read, host time, tokens/s."""

from __future__ import annotations

from dataclasses import fields
from pathlib import Path

from benchmarks import report
from benchmarks.decode_peers import DECODERS
from benchmarks.decode_steps import SETTINGS, SHORT
from benchmarks.report import best_of, judged, ratio
from benchmarks.runner import Case
from benchmarks.shapes import Shape
from native_sparse_attention.core.geometry import forced_priority, num_compressed_blocks
from train_enwik8 import Config

OURS, LEARNED, COPY = 'ours', 'ours-mlp', 'copy'
DENSE = {'cudnn': 'cuDNN', 'flash': 'FlashAttention-2'}
# Microseconds of a call without a graph.
MOST_HOST = 60
# Cases between which the time grows with the compressed keys.
GROWTH = ('64k-b1', '1m-b1')
NUM_INIT, NUM_LOCAL = 1, 2


def keys_read(shape: Shape) -> int:
    """Return the tokens that a row and KV head reads, each once, in the window and the selected blocks.

    The selected blocks are the forced ones and the lowest others; blocks that overlap the window more need less.
    """
    own = (shape.seqlen - 1) // shape.selection_block_size
    by_priority = sorted(range(own + 1), key=lambda block: -forced_priority(block, own, NUM_INIT, NUM_LOCAL, True))
    window = min(shape.window, shape.seqlen)
    before = shape.seqlen - window
    starts = (block * shape.selection_block_size for block in by_priority[: shape.num_selected])
    return window + sum(max(0, min(start + shape.selection_block_size, before) - start) for start in starts)


def compressed_read(shape: Shape) -> int:
    return num_compressed_blocks(shape.seqlen, shape.compress_block_size, shape.compress_stride)


def least_bytes(shape: Shape, pairs: int) -> int:
    """Return the bytes of a number of keys and values of every row and KV head."""
    return shape.batch * shape.kv_heads * (shape.head_dim + shape.value_dim) * shape.dtype.itemsize * pairs


class Found:
    """The rows by case and backend."""

    def __init__(self, rows: list[Case]) -> None:
        self.rows = {(row['shape'], row['backend']): row for row in rows if row['op'] == 'attention'}
        self.cases = [name for name in SETTINGS if any(name == case for case, _ in self.rows)]
        self.copy = next((row for row in rows if row['backend'] == COPY), {})

    def ms(self, case: str, backend: str) -> float | None:
        """Return ms, or None if it was not measured or the output is wrong."""
        row = self.rows.get((case, backend), {})
        return None if row.get('wrong') else row.get('forward_ms')

    def host_us(self, case: str, backend: str) -> float | None:
        return self.rows.get((case, backend), {}).get('host_us')

    def dense(self, case: str) -> tuple[float | None, str | None]:
        return best_of({title: self.ms(case, name) for name, title in DENSE.items()})

    def public(self, case: str) -> tuple[float | None, str | None]:
        return best_of({name: self.ms(case, name) for name in DECODERS})

    def read_ms(self, shape: Shape, pairs: int) -> float | None:
        """Return the time to read a number of keys and values of every row and KV head at the rate of a copy."""
        rate = ratio(self.copy.get('bytes'), self.copy.get('forward_ms'))
        return least_bytes(shape, pairs) / rate if rate else None

    def floor(self, case: str) -> float | None:
        shape = SETTINGS[case].shape
        return self.read_ms(shape, keys_read(shape) + compressed_read(shape))


def make_tables(rows: list[Case]) -> list[str]:
    found = Found(rows)
    return [*attention_tables(found), *generate_tables([row for row in rows if row['op'] == 'generate'])]


def attention_tables(found: Found) -> list[str]:
    if not found.cases:
        return []
    less = '; '.join(f'{name} leaves to its caller: {decoder.less}' for name, decoder in DECODERS.items())
    return [
        'ms of the attention of one layer for one new token of every row, from append to gated output, as a replay of '
        'a CUDA graph; medians. Before each the cache is put back to the same length and the L2 cache is written over, '
        'and meanwhile the replay is queued, so neither that nor its launch is in the time. The token completes a '
        'compressed block, as one in d does. Dense: the better of two, a group of heads as queries of one head. Floor: '
        "compressed keys and values, chosen blocks and the window, each token read once, at a copy's rate. "
        + f'{less}.',
        target_table(found),
        *verdicts(found),
        f'Without a graph, µs that the host takes for a call, whatever the GPU takes; at most {MOST_HOST} for a layer:',
        host_table(found),
        'Everything measured. Low, high: of so many replays. Error: typical of the first and the last row against '
        'float32, relative to its norm:',
        row_table(found),
        report.table(('case', ''), [[name, SETTINGS[name].shape.described()] for name in found.cases]),
    ]


def target_table(found: Found) -> str:
    body = []
    for case in found.cases:
        ours, target, floor = found.ms(case, OURS), SETTINGS[case].target, found.floor(case)
        (dense, which_dense), (public, which) = found.dense(case), found.public(case)
        compared = (ratio(dense, ours), ratio(public, ours), ratio(ours, floor))
        learned = found.ms(case, LEARNED)
        cells = [ours, target, judged(ours, target), learned, dense, which_dense, public, which, floor, *compared]
        body.append([case, *cells])
    names = ('ours', 'reach', 'verdict', 'ours, learned φ', 'dense', 'dense by', 'public', 'public by', 'floor')
    return report.table(('case', *names, 'dense / ours', 'public / ours', 'ours / floor'), body)


def verdicts(found: Found) -> list[str]:
    """Say how many targets and comparisons are met, what the length costs, and the rates of the machine."""
    limits = {
        'targets are met': lambda case: SETTINGS[case].target,
        'cases are no slower than dense attention': lambda case: found.dense(case)[0],
        'cases are no slower than the best public implementation': lambda case: found.public(case)[0],
    }
    parts = []
    for text, limit in limits.items():
        verdict = {case: judged(found.ms(case, OURS), limit(case)) for case in found.cases}
        known = {case: words for case, words in verdict.items() if words}
        over = [f'{case} {words}' for case, words in known.items() if words != 'met']
        if known:
            parts.append(f'{len(known) - len(over)} of {len(known)} {text}' + f'; {", ".join(over)}' * bool(over))
    return [*([' '.join(f'{part}.' for part in parts)] if parts else []), *growth(found), *machine_lines(found)]


def growth(found: Found) -> list[str]:
    short, long = (SETTINGS[case].shape for case in GROWTH)
    times = [found.ms(case, OURS) for case in GROWTH]
    more = found.read_ms(long, compressed_read(long) - compressed_read(short))
    if times[0] is None or times[1] is None or more is None:
        return []
    grown = times[1] - times[0]
    return [
        f'From {GROWTH[0]} to {GROWTH[1]} the time grows by {grown:.3f} ms, {grown / more:.2f} times what reading the '
        f'compressed keys and values that are more takes ({more:.3f} ms).'
    ]


def machine_lines(found: Found) -> list[str]:
    rate = ratio(found.copy.get('bytes'), found.copy.get('forward_ms'))
    if rate is None:
        return []
    empty = found.copy.get('empty_ms')
    also = f' A replay of a kernel that writes one number shows {empty:.4f} ms.' if empty else ''
    return [f'A copy reads and writes {rate / 1e6:.0f} GB/s.{also}']


def host_table(found: Found) -> str:
    names = [name for name in (OURS, LEARNED, *DECODERS) if any(name == used for _, used in found.rows)]
    body = []
    for case in found.cases:
        times = {name: found.host_us(case, name) for name in names}
        body.append([case, judged(times.get(OURS), MOST_HOST), *times.values()])
    return report.table(('case', 'verdict', *names), body)


def row_table(found: Found) -> str:
    body = []
    for (case, backend), row in found.rows.items():
        low_high = row.get('spreads', {}).get('forward', [None] * 3)
        cells = [row.get('forward_ms'), *low_high, row.get('host_us'), row.get('error'), row.get('note', '')]
        body.append([case, backend, *cells])
    return report.table(('case', 'backend', 'ms', 'low', 'high', 'replays', 'host µs', 'error', ''), body)


def generate_tables(rows: list[Case]) -> list[str]:
    if not rows:
        return []
    named = {(row['batch'], row['backend']): row for row in rows}
    models = list(dict.fromkeys(row['backend'] for row in rows))
    body = []
    for batch in sorted({row['batch'] for row in rows}):
        of_models = [named.get((batch, model), {}) for model in models]
        rates = [row.get('tokens_per_s') for row in of_models]
        shown = [None if rate is None else f'{rate:,.0f}' for rate in rates]
        sparse, dense = (named.get((batch, model), {}).get('tokens_per_s') for model in ('sparse', 'dense'))
        steps = [row.get('forward_ms') for row in of_models]
        starts = [row.get('start_ms') for row in of_models]
        notes = '; '.join(f'{row["backend"]}: {row["note"]}' for row in of_models if row.get('note'))
        body.append([str(batch), *shown, ratio(sparse, dense), *steps, *starts, notes])
    columns = [f'{model}, {what}' for what in ('tokens/s', 'ms a step', 'ms at the start') for model in models]
    columns.insert(len(models), 'sparse / dense')
    shown_fields = [f.name for f in fields(Config) if {'model', 'sparse'} & f.metadata.keys()]
    settings = ', '.join(f'{name} {rows[0]["config"][name]}' for name in shown_fields)
    return [
        f'`Transformer.generate` after a prompt of {rows[0]["context"]:,} tokens, in bfloat16 on a GPU: tokens per '
        f'second of all rows together, from the difference of two calls that give {SHORT} and {rows[0]["tokens"]} more '
        'tokens. At the start: what both calls do once, the prompt among it. Medians of wall-clock times.',
        report.table(('batch', *columns, ''), body),
        f'Model: {settings}.',
    ]


def plot(path: Path, rows: list[Case], title: str) -> None:
    """Draw for each case bars of ours, dense attention and the best peer, and lines at target and floor."""
    from matplotlib.figure import Figure

    found = Found(rows)
    cases = found.cases
    figure = Figure(figsize=(max(6, 0.8 * len(cases)), 5), layout='constrained')
    axes = figure.add_subplot(ylabel='ms of a layer and token', title=title)
    bars = {
        'ours': [found.ms(case, OURS) for case in cases],
        'ours, learned φ': [found.ms(case, LEARNED) for case in cases],
        'dense': [found.dense(case)[0] for case in cases],
        'best public': [found.public(case)[0] for case in cases],
    }
    for i, (name, times) in enumerate(bars.items()):
        axes.bar([x + 0.2 * (i - 1.5) for x in range(len(cases))], [time or 0 for time in times], 0.18, label=name)
    for name, color, values in (
        ('target', 'black', [SETTINGS[case].target for case in cases]),
        ('floor', 'gray', [found.floor(case) for case in cases]),
    ):
        known = [(x, value) for x, value in enumerate(values) if value]
        if known:
            starts = [x - 0.4 for x, _ in known]
            axes.hlines(
                [value for _, value in known],
                starts,
                [x + 0.8 for x in starts],
                colors=color,
                linestyles='dashed',
                label=name,
            )
    axes.set_yscale('log')
    axes.set_xticks(range(len(cases)), cases, rotation=45, ha='right')
    figure.legend(loc='outside upper center', ncols=3)
    figure.savefig(path, dpi=120)
