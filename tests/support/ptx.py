"""Digest the compiled code of every kernel build, to prove that a change of the source changes no code.

    python -m tests.support.ptx --out before.json
    python -m tests.support.ptx --out after.json --only rotary           ops by part of their name
    python -m tests.support.ptx --compare before.json after.json         exit status 1 where the code differs
    python -m tests.support.ptx --compare ../other-tree .                builds both trees, then compares

The kernel builds are those of `tests/support/builds.py`, which needs no GPU. A digest covers the launch options and the
code without names: functions, parameters, SSA values, file names and lines are left out, and parameters are numbered by
their first use. So neither a renamed or reordered parameter nor one that is never read changes a digest.

`--stage ttir` stops at Triton's IR, in a fraction of the time. The stages from there to PTX see nothing else than this
IR and the options: equal digests of the IR imply equal PTX. Different ones do not imply different PTX.
"""

from __future__ import annotations

import argparse
import hashlib
import importlib
import itertools
import json
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any, NamedTuple

BUILD = ('sm90', 'bfloat16', '128', 'kinds')
BUILDS_MODULE = 'tests.support.builds'
STAGES = ('ttir', 'ptx')
# Name of an SSA value; those of tuples have dots.
VALUE = r'%\w+(?:\.\w+)*'
# Launch options that the compiler reads beside the IR.
OPTIONS = ('num_warps', 'num_stages', 'num_ctas', 'maxnreg', 'enable_fp_fusion', 'arch', 'ptx_options')


class Difference(NamedTuple):
    """Kernels whose code stands in one of two files alone, and pairs of names of kernels with equal code."""

    missing: list[str]
    added: list[str]
    renamed: list[tuple[str, str]]


def normalize_ptx(ptx: str) -> str:
    """Return the instructions of a PTX module with symbols numbered by their first use."""
    ptx = re.sub(r'^\s*\.section\s+\.debug.*?^\s*\}\s*$', '', ptx, flags=re.MULTILINE | re.DOTALL)
    ptx = re.sub(r'//.*|/\*.*?\*/', '', ptx)
    lines = [line.strip() for line in ptx.splitlines()]
    labels = re.compile(r'\$L__(tmp|func_begin|func_end|info_string)\w*:?$')
    kept = [
        line for line in lines if line and not line.startswith(('.loc', '.file', '.param')) and not labels.match(line)
    ]
    text = '\n'.join(kept)
    # Parameters first: their names begin with the name of the function.
    text = number_names(text, r'\b\w+_param_\d+\b', 'param')
    return number_names(text, r'(?<=\.entry )\w+|(?<=\.func )[\w$]+', 'function')


def normalize_ttir(ttir: str) -> str:
    """Return a module of Triton's IR without locations, its SSA values, arguments included, numbered by first use."""
    lines = [line for line in ttir.splitlines() if not line.startswith('#loc')]
    text = remove_locations('\n'.join(lines))
    functions = list(dict.fromkeys(re.findall(r'tt\.func \w+ @([\w.$"]+)', text)))
    for i, name in enumerate(functions):
        text = re.sub(rf'@{re.escape(name)}(?=\()', f'@function{i}', text)
    parts = re.split(r'^(\s*tt\.func .*\{)$', text, flags=re.MULTILINE)
    # Before the first function, then a signature and a body for each.
    bodies = [normalize_function(*parts[i : i + 2]) for i in range(1, len(parts), 2)]
    return '\n'.join([parts[0], *bodies])


def normalize_function(signature: str, body: str) -> str:
    arguments = dict(re.findall(rf'({VALUE}): ([^%]*?)(?=, %|\))', signature))
    body, numbers = number_values(body)
    used = [f'{arguments[name]} {number}' for name, number in numbers.items() if name in arguments]
    head = re.sub(r'\(.*?\)(?= attributes| ->| \{)', '()', signature, count=1)
    return '\n'.join([head, *used, body])


def number_values(body: str) -> tuple[str, dict[str, str]]:
    """Number SSA values by their definitions, since the printer uses a name again in a region beside the first one.

    Returns the text, and the last number of every name; arguments are numbered by their first use.
    """
    numbers: dict[str, str] = {}
    count = itertools.count()
    lines: list[str] = []
    for line in body.splitlines():
        parts = re.split(rf'({VALUE})', line)
        # Results stand before the first ' =', arguments of a loop each before one of their own.
        is_block, num_results = line.lstrip().startswith('^'), len(re.split(rf'({VALUE})', line.split(' =')[0]))
        is_result = ' =' in line and line.lstrip().startswith('%')
        new: dict[str, str] = {}
        for i in range(1, len(parts), 2):
            if is_block or (is_result and i < num_results) or parts[i + 1].startswith(' ='):
                new[parts[i]] = parts[i] = f'%{next(count)}'
            else:
                if parts[i] not in numbers:
                    numbers[parts[i]] = f'%{next(count)}'
                parts[i] = numbers[parts[i]]
        numbers |= new
        lines.append(''.join(parts))
    return '\n'.join(lines), numbers


def remove_locations(text: str) -> str:
    """Remove every `loc(...)`, whose parentheses may be nested."""
    parts = text.split(' loc(')
    kept = [parts[0]]
    for part in parts[1:]:
        depth, end = 1, 0
        while depth:
            depth += {'(': 1, ')': -1}.get(part[end], 0)
            end += 1
        kept.append(part[end:])
    return ''.join(kept)


def number_names(text: str, pattern: str, stem: str) -> str:
    numbers: dict[str, str] = {}
    for name in re.findall(pattern, text):
        numbers.setdefault(name, f'{stem}{len(numbers)}')
    return re.sub(rf'{pattern}', lambda match: numbers[match[0]], text)


NORMALIZE = {'ttir': normalize_ttir, 'ptx': normalize_ptx}


class Recorder:
    """Compile kernels up to `stage` where they would be launched, and collect a digest of each in `kernels`.

    texts: a folder for the code that is digested, or None.
    """

    def __init__(self, builds: Any, stage: str, texts: Path | None) -> None:
        self.builds = builds
        self.stages = STAGES[: STAGES.index(stage) + 1]
        self.texts = texts
        self.kernels: dict[str, dict[str, str]] = {}

    def select_stages(
        self, backend: Any = None, stages: Any = None, options: Any = None, language: Any = None, capability: Any = None
    ) -> Any:
        """Triton's `add_stages_inspection_hook`: without arguments it gives a key for the cache."""
        if stages is None:
            return f'digest of {self.stages[-1]}', ''
        for name in list(stages)[list(stages).index(self.stages[-1]) + 1 :]:
            stages[name] = make_nothing
        return None

    def compile(self, kernel: Any, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> Any:
        compiled = self.builds.run_jit(kernel, *args, grid=grid, warmup=True, **kwargs)
        options = {name: str(getattr(compiled.metadata, name, None)) for name in OPTIONS}
        name = f'{kernel.fn.__module__.removeprefix("native_sparse_attention.ops.")}.{kernel.fn.__name__}'
        record = {'kernel': name}
        for stage in self.stages:
            text = f'{options}\n{NORMALIZE[stage](compiled.asm[stage])}'
            record[stage] = hashlib.sha256(text.encode()).hexdigest()
            if self.texts is not None:
                (self.texts / f'{name}.{record[stage][:12]}.{stage}').write_text(text)
        if record[self.stages[-1]] not in self.kernels:
            self.kernels[record[self.stages[-1]]] = record
            print(name, record[self.stages[-1]][:12], file=sys.stderr, flush=True)
        return compiled


def make_nothing(module: Any, metadata: dict[str, Any]) -> bytes:
    """Return empty code for a stage that is left out, with the metadata that Triton expects of it."""
    metadata.setdefault('shared', 0)
    metadata.setdefault('tmem_size', 0)
    metadata.setdefault('name', 'kernel')
    for name in ('global_scratch_size', 'global_scratch_align', 'profile_scratch_size', 'profile_scratch_align'):
        metadata.setdefault(name, 0)
    return b''


def digest(args: argparse.Namespace) -> dict[str, Any]:
    """Build the kernels of the tree that Python imports from."""
    builds: Any = importlib.import_module(args.builds)  # before Triton: it switches the interpreter off
    from triton import knobs

    recorder = Recorder(builds, args.stage, args.texts)
    runtime: Any = knobs.runtime
    runtime.add_stages_inspection_hook = recorder.select_stages
    builds.compile_only = recorder.compile
    builds.main(*args.build, args.only)
    return {'build': [*args.build], 'only': args.only, 'kernels': list(recorder.kernels.values())}


def digest_tree(tree: Path, args: argparse.Namespace) -> dict[str, Any]:
    """Build the kernels of a tree in a process of its own."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / 'digests.json'
        command = [sys.executable, '-P', str(Path(__file__).resolve()), '--out', str(out), '--build', *args.build]
        command += ['--only', args.only, '--stage', args.stage, '--builds', args.builds]
        environment = os.environ | {'PYTHONPATH': str(tree.resolve()), 'CUDA_VISIBLE_DEVICES': ''}
        subprocess.run(command, cwd=tree, env=environment, check=True)
        return json.loads(out.read_text())


def compare(before: dict[str, Any], after: dict[str, Any]) -> Difference:
    """Compare digests of the last stage that both files have.

    Raises:
        ValueError: the files are of different builds or ops.
    """
    for key in ('build', 'only'):
        if before[key] != after[key]:
            raise ValueError(f'{key} must be equal in both files, got {before[key]} and {after[key]}')
    kernels = [*before['kernels'], *after['kernels']]
    stage = next(stage for stage in reversed(STAGES) if all(stage in kernel for kernel in kernels))
    old, new = ({kernel[stage]: kernel['kernel'] for kernel in file['kernels']} for file in (before, after))
    renamed = {(old[code], new[code]) for code in old.keys() & new.keys() if old[code] != new[code]}
    missing, added = (sorted(a[code] for code in a.keys() - b.keys()) for a, b in ((old, new), (new, old)))
    return Difference(missing, added, sorted(renamed))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument('--out', type=Path, help='file to write the digests to')
    parser.add_argument('--texts', type=Path, help='folder to write the digested code to')
    parser.add_argument('--only', default='', help='part of the name of the ops to build')
    parser.add_argument('--build', nargs=4, default=BUILD, metavar=('ARCHITECTURE', 'DTYPE', 'HEAD_DIM', 'VARIANTS'))
    parser.add_argument('--builds', default=BUILDS_MODULE, help='module of the kernel builds')
    parser.add_argument('--stage', choices=STAGES, default='ptx')
    parser.add_argument('--compare', nargs=2, type=Path, metavar=('BEFORE', 'AFTER'), help='files, or folders of trees')
    args = parser.parse_args()
    if (args.out is None) == (args.compare is None):
        parser.error('one of --out and --compare is required')
    if args.texts is not None:
        args.texts.mkdir(parents=True, exist_ok=True)
    if args.out is not None:
        args.out.write_text(json.dumps(digest(args), indent=1) + '\n')
        return
    files = [digest_tree(path, args) if path.is_dir() else json.loads(path.read_text()) for path in args.compare]
    difference = compare(*files)
    for title, names in zip(difference._fields, difference, strict=True):
        for name in names:
            print(title, *((name,) if isinstance(name, str) else name))
    count = len(files[0]['kernels'])
    print(f'{count} kernels before, {len(files[1]["kernels"])} after, {len(difference.missing)} of the former missing')
    sys.exit(bool(difference.missing or difference.added))


if __name__ == '__main__':
    main()
