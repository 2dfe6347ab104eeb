"""Draw the figures of the documentation: `python docs/figures.py` writes the SVG files of docs/assets/.

The charts of speed and learning read committed results, so they change with those files alone. Every figure brings its
own background for light and dark schemes.
"""

from __future__ import annotations

import json
import math
from html import escape
from itertools import pairwise
from pathlib import Path
from statistics import mean
from typing import Any

ROOT = Path(__file__).parents[1]
ASSETS = ROOT / 'docs' / 'assets'
GATED, DASHED = 'merged-dense-mass-far-output-gate-qk-norm', ' stroke-dasharray="7 4"'
RESULTS = ROOT / 'benchmarks' / 'results' / 'h200'
SPEED_RESULT = RESULTS / 'parts.json'
# Lines of the chart of learning: folder, variant, colour and dashes. Blue is merged attention, dashes are C.
LEARNING_LINES = {
    'merged, output gate, Python': (RESULTS / 'learning-16k-qk-norm', GATED, 'slc', ''),
    'merged, output gate, C': (RESULTS / 'learning-16k-linux-c-qk-norm', GATED, 'slc', DASHED),
    'three branches, Python': (RESULTS / 'learning-16k-qk-norm', 'separate-qk-norm', 'win', ''),
    'three branches, C': (RESULTS / 'learning-16k-linux-c-qk-norm', 'separate-qk-norm', 'win', DASHED),
}
LEARNING_STEPS = (1000, 1200, 1400, 1600, 1800, 2000, 2400, 2800, 3200, 3600, 4000, 4400)
# Shapes of that result that differ in length alone: 64 query heads, 4 KV heads of 128, bfloat16.
LENGTHS = {
    4096: 'short-4k-h4',
    8192: 'paper-8k-h4',
    16384: 'paper-16k-h4',
    32768: 'paper-32k-h4',
    65536: 'paper-64k-h4',
    131072: 'long-128k-h4',
}
STYLE = """
  text { font: 13px system-ui, sans-serif; fill: #24292f }
  .small { font-size: 11.5px; fill: #57606a }
  .head { font-weight: 600 } text.white { fill: #ffffff }
  .panel { fill: #ffffff; stroke: #d0d7de }
  .cell { fill: #eaeef2 } .line { stroke: #8c959f; fill: none } .grid { stroke: #d8dee4 }
  .cmp { fill: #8250df } .slc { fill: #1f6feb } .win { fill: #1a7f37 } .query { fill: #cf222e }
  .cmp-line { stroke: #8250df } .slc-line { stroke: #1f6feb } .win-line { stroke: #1a7f37 }
  @media (prefers-color-scheme: dark) {
    text { fill: #e6edf3 } .small { fill: #9ea7b3 } text.white { fill: #0d1117 }
    .panel { fill: #0d1117; stroke: #30363d } .cell { fill: #262c36 }
    .line { stroke: #6e7681 } .grid { stroke: #262c36 }
    .cmp { fill: #a371f7 } .slc { fill: #58a6ff } .win { fill: #3fb950 } .query { fill: #ff7b72 }
    .cmp-line { stroke: #a371f7 } .slc-line { stroke: #58a6ff } .win-line { stroke: #3fb950 }
  }
"""


def main() -> None:
    ASSETS.mkdir(exist_ok=True)
    (ASSETS / 'branches.svg').write_text(draw_branches(), encoding='utf-8')
    (ASSETS / 'scores.svg').write_text(draw_scores(), encoding='utf-8')
    (ASSETS / 'speed.svg').write_text(draw_speed(read_speed()), encoding='utf-8')
    (ASSETS / 'learning.svg').write_text(draw_learning(read_learning()), encoding='utf-8')


def draw_branches() -> str:
    """Return a picture of the keys that one query reads in each branch: 64 tokens, l = d = 4, l' = 8, n = 4, W = 12."""
    tokens, query, left, cell, gap = 64, 59, 150, 9, 2
    pitch = cell + gap
    selected = (0, 3, 6, 7)  # the initial block, one of high score, two local ones

    def x(token: int) -> int:
        return left + token * pitch

    def cells(y: int, read: set[int], css: str) -> list[str]:
        return [box(x(t), y, cell, 16, css if t in read else 'cell') for t in range(tokens)]

    parts = [
        label(16, 26, 'Keys that the query at the red mark reads', 'head'),
        label(16, 57, 'sequence'),
        *cells(45, {query}, 'query'),
        label(left, 77, '← past', 'small'),
        label(x(tokens), 77, 'future →', 'small', 'end'),
    ]
    for block in range(tokens // 4):  # compressed: one key for each complete block of 4 tokens
        end = block * 4 + 3
        css = 'cmp' if end <= query else 'cell'
        parts.append(box(x(block * 4) + 6, 102, 4 * pitch - gap - 12, 16, css))
    parts += [
        label(16, 107, '1 compressed', 'head'),
        label(16, 122, 'block summaries', 'small'),
        label(16, 165, '2 selected', 'head'),
        label(16, 180, 'n blocks, exact', 'small'),
        *cells(160, {t for t in range(query + 1) if t // 8 in selected}, 'slc'),
        label(16, 223, '3 window', 'head'),
        label(16, 238, 'last W keys, exact', 'small'),
        *cells(218, set(range(query - 11, query + 1)), 'win'),
    ]
    # The compressed scores of a selection block decide what the second branch reads.
    for block in selected:
        middle = x(block * 8) + 4 * pitch
        parts.append(f'<path class="line" d="M{middle},122 V154 m-4,-6 l4,6 l4,-6"/>')
    names = ('initial', 'highest score', 'local', 'local')
    for block, name in zip(selected, names, strict=True):
        parts.append(label(x(block * 8) + 4 * pitch, 195, name, 'small', 'middle'))
    parts.append(label(left, 272, 'output = g₁ · compressed + g₂ · selected + g₃ · window', 'head'))
    parts.append(label(left, 290, 'g: one sigmoid gate per query head and branch, computed from the input', 'small'))
    return svg(870, 306, 'The three branches of Native Sparse Attention', parts)


def draw_scores() -> str:
    """Return a picture of equation 9, l, d, l' = 32, 16, 64: compressed blocks that count for a selection block."""
    left, pitch = 170, 38  # pixels of d tokens
    parts = [
        label(16, 26, 'Compressed attention weights that add up to the score of selection block j', 'head'),
        label(16, 62, 'selection blocks', 'head'),
        label(16, 77, "l' = 64 tokens", 'small'),
        label(16, 130, 'compressed blocks', 'head'),
        label(16, 145, 'l = 32, d = 16 tokens', 'small'),
    ]
    for number, name in enumerate(('j − 1', 'j', 'j + 1')):
        x = left + number * 4 * pitch
        parts.append(box(x + 1, 50, 4 * pitch - 2, 24, 'slc' if name == 'j' else 'cell'))
        parts.append(label(x + 2 * pitch, 67, name, 'white' if name == 'j' else '', 'middle'))
    for number in range(11):
        start, end = number, number + 2  # in units of d
        tokens_inside = max(0, min(end, 8) - max(start, 4))
        y = 102 + 26 * (number % 2)
        x = left + start * pitch
        parts.append(box(x + 2, y, 2 * pitch - 4, 20, 'cmp' if tokens_inside else 'cell'))
        parts.append(label(x + pitch, y + 15, str(tokens_inside), 'white' if tokens_inside else 'small', 'middle'))
    parts.append(
        label(16, 182, 'The numbers are |tokens in both| / d: the weight p[c] of a compressed block counts', 'small')
    )
    parts.append(label(16, 198, 'once for every d tokens that it shares with the selection block.', 'small'))
    return svg(left + 12 * pitch + 20, 214, 'Scores of selection blocks', parts)


def read_speed() -> list[tuple[int, dict[str, dict[str, float]]]]:
    """Return (tokens, {'nsa' or 'dense': {'forward', 'backward' and 'total': ms}}) for each length."""
    rows = json.loads(SPEED_RESULT.read_text(encoding='utf-8'))['rows']
    found = {(row['shape'], row['backend']): row for row in rows if row['op'] == 'nsa'}

    def times(row: dict[str, Any]) -> dict[str, float]:
        return {what: row[f'{what}_ms'] for what in ('forward', 'backward', 'total')}

    return [
        (tokens, {'nsa': times(found[shape, 'triton']), 'dense': times(found[shape, 'cudnn'])})
        for tokens, shape in LENGTHS.items()
    ]


def draw_speed(speed: list[tuple[int, dict[str, dict[str, float]]]]) -> str:
    """Return a chart of dense time over NSA time, forward and backward added, on logarithmic axes."""
    left, right, top, bottom = 70, 730, 56, 316
    low, high = 0.35, 10.0

    def x(tokens: float) -> float:
        return left + 20 + (right - left - 60) * math.log2(tokens / speed[0][0]) / math.log2(speed[-1][0] / speed[0][0])

    def y(ratio: float) -> float:
        return bottom - (bottom - top) * math.log(ratio / low) / math.log(high / low)

    points = [(tokens, ms['dense']['total'] / ms['nsa']['total']) for tokens, ms in speed]
    cross = crossing(points)
    parts = [
        label(16, 26, 'Faster than dense attention from here on', 'head'),
        label(16, 44, 'time of dense attention (cuDNN) / time of nsa, forward + backward', 'small'),
        f'<rect class="win" opacity="0.12" x="{x(cross):.1f}" y="{top}" width="{right - x(cross):.1f}" '
        f'height="{bottom - top}"/>',
    ]
    for ratio in (0.5, 1, 2, 4, 8):
        parts.append(f'<path class="{"line" if ratio == 1 else "grid"}" d="M{left},{y(ratio):.1f} H{right}"/>')
        parts.append(label(left - 8, round(y(ratio)) + 4, f'{ratio:g}×', 'small', 'end'))
    for tokens, _ in points:
        parts.append(label(round(x(tokens)), bottom + 20, f'{tokens // 1024}k', 'small', 'middle'))
    path = ' L'.join(f'{x(tokens):.1f},{y(ratio):.1f}' for tokens, ratio in points)
    parts.append(f'<path class="slc-line" fill="none" stroke-width="2.5" d="M{path}"/>')
    for tokens, ratio in points:
        parts.append(f'<circle class="slc" cx="{x(tokens):.1f}" cy="{y(ratio):.1f}" r="4"/>')
        parts.append(label(round(x(tokens)) + 8, round(y(ratio)) + 18, f'{ratio:.1f}×'))
    parts += [
        f'<path class="win-line" stroke-dasharray="5 4" d="M{x(cross):.1f},{top} V{bottom}"/>',
        label(round(x(cross)) + 8, bottom - 10, f'about {cross / 1024:.0f}k tokens'),
        label((left + right) // 2, bottom + 40, 'sequence length in tokens', 'small', 'middle'),
        label(16, bottom + 62, 'One H200, bfloat16, 64 query and 4 KV heads of 128, '
              "l/d/l'/n/W = 32/16/64/16/512.", 'small'),
    ]  # fmt: skip
    return svg(750, bottom + 76, 'Speed of nsa over dense attention by sequence length', parts)


def read_learning() -> dict[str, dict[str, Any]]:
    """Return mean Δ bits per byte to dense attention from the same starts, for each line of the chart.

    A line is {'starts': number of starts, 'steps': {first step of 100: Δ in training}, 'ranges': {range of positions:
    Δ on test}}.
    """
    lines = {}
    for name, (folder, variant, _, _) in LEARNING_LINES.items():
        read = {path.stem: json.loads(path.read_text(encoding='utf-8')) for path in folder.glob('*-seed*.json')}
        runs = [record for record in read.values() if record['variant'] == variant]
        twins = {record['seed']: record for record in read.values() if record['variant'] == 'dense-qk-norm'}
        steps = {}
        for first in LEARNING_STEPS:
            steps[first] = mean(mean_loss(run, first) - mean_loss(twins[run['seed']], first) for run in runs)
        ranges = {}
        for span in twins[0]['test_by_position']:
            ranges[span] = mean(r['test_by_position'][span] - twins[r['seed']]['test_by_position'][span] for r in runs)
        lines[name] = {'starts': len(runs), 'steps': steps, 'ranges': ranges}
    return lines


def mean_loss(run: dict[str, Any], first: int) -> float:
    """Return mean bits per byte of 100 training steps after `first`; a row has the mean since the row before."""
    total, before = 0.0, 0
    for row in run['train']:
        total += row['bpb'] * max(0, min(row['step'], first + 100) - max(before, first))
        before = row['step']
    return total / 100


def draw_learning(lines: dict[str, dict[str, Any]]) -> str:
    """Return two charts of Δ bits per byte to dense attention: over training steps, and by position at the end."""
    top, bottom = 98, 328
    names = ('0–128', '–512', '–1k', '–2k', '–4k', '–16k')
    parts = [label(16, 26, 'Bits per byte minus those of dense attention: below the line of 0 is better', 'head')]
    first, last = LEARNING_STEPS[0], LEARNING_STEPS[-1]
    steps = {step: (step - first) / (last - first) for step in LEARNING_STEPS}
    ranges = {span: place / (len(names) - 1) for place, span in enumerate(next(iter(lines.values()))['ranges'])}
    panels = (
        (84, 376, 'steps', steps, (-4, 2, 0.03), 'training step', {s: f'{s:,}' for s in (1000, 2000, 3200, 4400)}),
        (470, 762, 'ranges', ranges, (-3, 3, 0.015), 'position in the sequence (test, at the end)',
         dict(zip(ranges, names, strict=True))),
    )  # fmt: skip
    for left, right, kind, places, (low, high, unit), title, ticks in panels:

        def x(place: float, left: int = left, right: int = right) -> float:
            return left + 14 + (right - left - 28) * place

        def y(delta: float, low: float = low * unit, high: float = high * unit) -> float:
            return bottom - (bottom - top) * (delta - low) / (high - low)

        for tick in range(low, high + 1):
            height = y(tick * unit)
            css, width = ('line', 3) if tick == 0 else ('grid', 1)
            parts.append(f'<path class="{css}" stroke-width="{width}" d="M{left},{height:.1f} H{right}"/>')
            value = f'{tick * unit:+.3f}' if tick else '0 = dense'
            parts.append(label(left - 8, round(height) + 4, value.replace('-', '−'), 'small', 'end'))
        for at, tick in ticks.items():
            parts.append(label(round(x(places[at])), bottom + 20, tick, 'small', 'middle'))
        for name, (_, _, css, dash) in LEARNING_LINES.items():
            points = [(x(place), y(lines[name][kind][at])) for at, place in places.items()]
            path = ' L'.join(f'{a:.1f},{b:.1f}' for a, b in points)
            parts.append(f'<path class="{css}-line" fill="none" stroke-width="2.5"{dash} d="M{path}"/>')
            parts += [f'<circle class="{css}" cx="{a:.1f}" cy="{b:.1f}" r="3"/>' for a, b in points]
        parts.append(label((left + right) // 2, bottom + 42, title, '', 'middle'))
    for place, (name, (_, _, css, dash)) in enumerate(LEARNING_LINES.items()):
        across, down = 16 + 390 * (place % 2), 50 + 22 * (place // 2)
        parts.append(f'<path class="{css}-line" stroke-width="2.5"{dash} d="M{across},{down - 4} h34"/>')
        parts.append(label(across + 44, down, f'{name}, {lines[name]["starts"]} starts'))
    parts += [
        label(16, bottom + 68, 'Means of starts; 16,384 tokens, 300 million bytes, QK-norm in all models. '
              'Left: the 100 training steps after a point.', 'small'),
    ]  # fmt: skip
    return svg(780, bottom + 82, 'Bits per byte of sparse minus dense attention', parts)


def crossing(points: list[tuple[int, float]]) -> float:
    """Return the length at which the ratio is 1, by a power law between the two measured lengths around it."""
    for (short, below), (long, above) in pairwise(points):
        if below < 1 <= above:
            return short * (long / short) ** (-math.log(below) / math.log(above / below))
    raise ValueError(f'points are {points}, but must cross a ratio of 1')


def box(x: float, y: float, width: float, height: float, css: str) -> str:
    return f'<rect class="{css}" x="{x}" y="{y}" width="{width}" height="{height}" rx="2"/>'


def label(x: int, y: int, text: str, css: str = '', anchor: str = 'start') -> str:
    return f'<text x="{x}" y="{y}" class="{css}" text-anchor="{anchor}">{escape(text)}</text>'


def svg(width: int, height: int, title: str, parts: list[str]) -> str:
    body = '\n'.join(
        (
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" role="img">',
            f'<title>{escape(title)}</title>',
            f'<style>{STYLE}</style>',
            f'<rect class="panel" x="0.5" y="0.5" width="{width - 1}" height="{height - 1}" rx="8"/>',
            *parts,
            '</svg>',
        )
    )
    return body + '\n'


if __name__ == '__main__':
    main()
