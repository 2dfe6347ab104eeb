"""Provenance of measurements, and the result files `benchmarks/results/<gpu>/<benchmark>.md`, `.json` and `.png`."""

from __future__ import annotations

import argparse
import json
import platform
import re
import subprocess
import sys
from collections.abc import Mapping, Sequence
from datetime import datetime, timezone
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / 'benchmarks' / 'results'
# Facts that rows of one table have in common.
SAME = ('gpu', 'commit', 'torch', 'triton')
# Text of tables with `fastest`.
FASTEST = 'Fastest: of the runs of a pass; others may be at the power limit of the GPU, or wait for the host'


def make_parser(description: str | None, prog: str | None = None) -> argparse.ArgumentParser:
    """Return a parser with the options of every result."""
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(prog=prog, description=description, formatter_class=raw)
    add = parser.add_argument
    add('--out', type=Path, default=RESULTS, help='folder of the results (%(default)s)')
    add('--device', default='cuda', help='cuda, or cpu to try the script (%(default)s)')
    add('--commit', default=None, help='of the code, if there is no git repository')
    return parser


def machine(device: str, commit: str | None) -> dict[str, Any]:
    """Return GPU, versions, commit, date and command. SystemExit if a GPU is requested and there is none."""
    if device == 'cuda' and not torch.cuda.is_available():
        raise SystemExit('--device cuda: there is no GPU; --help shows how to try the script with --device cpu')
    versions = {name: version(name) for name in ('torch', 'triton')}
    found = {
        'date': datetime.now(timezone.utc).strftime('%Y-%m-%d'),
        'commit': commit or git_commit(),
        'python': platform.python_version(),
        **versions,
        'commands': [' '.join(['python -m', *module_command()])],
    }
    if device == 'cpu':
        return {'gpu': 'cpu', **found}
    properties = torch.cuda.get_device_properties(0)
    return {
        'gpu': properties.name,
        'memory': f'{properties.total_memory / 2**30:.0f} GiB',
        'driver': driver(),
        'cuda': str(torch.version.cuda),
        **found,
    }


def module_command() -> list[str]:
    """Return the module and its arguments, except --out and --commit."""
    spec = getattr(sys.modules['__main__'], '__spec__', None)
    arguments = iter(sys.argv[1:])
    kept = []
    for argument in arguments:
        if argument in ('--out', '--commit'):
            next(arguments, None)
        else:
            kept.append(argument)
    return [spec.name.removesuffix('.__main__') if spec else sys.argv[0], *kept]


def version(package: str) -> str:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return 'none'


def driver() -> str:
    return _output('nvidia-smi', '--query-gpu=driver_version', '--format=csv,noheader').split('\n')[0] or 'unknown'


def git_commit() -> str:
    commit = _output('git', '-C', str(ROOT), 'rev-parse', '--short=12', 'HEAD')
    changed = _output('git', '-C', str(ROOT), 'status', '--porcelain', '--untracked-files=no')
    return (commit + ' with changes' * bool(changed)) if commit else 'unknown'


def _output(*command: str) -> str:
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True, timeout=20).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return ''


def gpu_slug(gpu: str) -> str:
    """Return 'h100' for 'NVIDIA H100 80GB HBM3'."""
    words = [word for word in re.findall(r'[a-z0-9]+', gpu.lower()) if word not in ('nvidia', 'geforce', 'tesla')]
    return words[0] if words else 'gpu'


def path(out: Path, where: dict[str, Any], what: str, suffix: str) -> Path:
    """`out/<gpu>/<what><suffix>`; creates the folder."""
    folder = out / gpu_slug(where['gpu'])
    folder.mkdir(parents=True, exist_ok=True)
    return folder / f'{what}{suffix}'


def find_earlier(out: Path, where: dict[str, Any], what: str) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """Return `where` with date and commands of the result in `out`, and the rows of that result.

    SystemExit if the result comes from another GPU, commit or version.
    """
    file = path(out, where, what, '.json')
    if not file.exists():
        return where, []
    earlier = json.loads(file.read_text(encoding='utf-8'))
    machine, rows = earlier['machine'], earlier['rows']
    for name in SAME:
        if machine[name] != where[name]:
            raise SystemExit(f'--add: {file} has {name} {machine[name]}, this run {where[name]}')
    commands = list(dict.fromkeys([*machine['commands'], *where['commands']]))
    return where | {'date': machine['date'], 'commands': commands}, rows


def write(out: Path, where: dict[str, Any], what: str, title: str, tables: Sequence[str], rows: Any) -> None:
    """Write the Markdown and the JSON file."""
    facts = ', '.join(f'{name} {value}' for name, value in where.items() if name not in ('gpu', 'commands'))
    commands = [f'`{command}`' for command in where['commands']]
    text = '\n\n'.join([f'# {title}', f'{where["gpu"]}: {facts}.', *commands, *tables])
    path(out, where, what, '.md').write_text(text + '\n', encoding='utf-8')
    body = {'machine': where, 'title': title, 'rows': rows}
    path(out, where, what, '.json').write_text(json.dumps(body, indent=1, default=str) + '\n', encoding='utf-8')


def table(columns: Sequence[str], rows: Sequence[Sequence[Any]]) -> str:
    """Return a Markdown table; numbers have three significant digits, None is a dash."""
    lines = ['| ' + ' | '.join(columns) + ' |', '| ' + ' | '.join('---' for _ in columns) + ' |']
    return '\n'.join([*lines, *('| ' + ' | '.join(map(cell, row)) + ' |' for row in rows)])


def fastest(row: dict[str, Any]) -> list[float | None]:
    """Return ms of the fastest run of a forward and of a backward."""
    return [row.get('spreads', {}).get(what, [None])[0] for what in ('forward', 'backward')]


def kernel_tables(rows: Sequence[dict[str, Any]]) -> dict[str, str]:
    """Return the table of kernel times (`timing.measure_kernels`) by its text; empty if no row has one."""
    body = []
    for row in rows:
        cells = [row.get(f'{what}_ms') for what in ('forward', 'forward_kernels', 'backward', 'backward_kernels')]
        if cells[1] is not None or cells[3] is not None:
            body.append([row['op'], row['shape'], row['backend'], *cells])
    columns = ('', 'shape', 'backend', 'forward', 'its kernels', 'backward', 'its kernels')
    text = (
        'Kernels and copies of short passes, ms, by the profiler, with warm caches. The rest of a pass is cold caches '
        'and waiting for the host:'
    )
    return {text: table(columns, body)} if body else {}


def cell(value: Any) -> str:
    if value is None:
        return '–'
    if isinstance(value, float):
        return f'{value:.0f}' if abs(value) >= 100 else f'{value:.3g}'
    return str(value)


def judged(value: float | None, limit: float | None) -> str | None:
    """Return 'met', or by how much a time misses its limit."""
    if value is None or limit is None:
        return None
    return 'met' if value <= limit else f'missed by {100 * (value / limit - 1):.1f} %'


def reached(value: float, least: float) -> str:
    """Return 'met', or by how much a figure falls short of its least value."""
    return 'met' if value >= least else f'missed by {100 * (1 - value / least):.1f} %'


def best_of(times: Mapping[str, float | None]) -> tuple[float | None, str | None]:
    """Return the smallest time that was measured, and its name."""
    known = {name: time for name, time in times.items() if time}
    name = min(known, key=known.__getitem__, default=None)
    return (known[name], name) if name else (None, None)


def ratio(a: float | None, b: float | None) -> float | None:
    return a / b if a and b else None


def gib(size: int | None) -> float | None:
    return None if size is None else size / 2**30
