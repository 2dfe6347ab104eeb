"""The text of `benchmarks.learning`: one file of bytes, mapped into memory, in three splits."""

from __future__ import annotations

import hashlib
import json
import lzma
import shutil
import sysconfig
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from trainer.corpus import read
from trainer.folder import atomically

PYTHON_SOURCES = 'python-sources'
PYTHON_SOURCES_BYTES = 200_000_000
BLOCK = 2**20


def prepare(data: str, folder: Path) -> dict[str, Any]:
    """Return name, path, bytes and sha256 of the text that `data` names. Unpacked texts are cached in the folder.

    data: 'python-sources' (the .py files of this interpreter, at most 200 MB), a folder (its files in sorted order,
    without hidden ones), or a file, which may be .gz, .zip or .xz.
    """
    path = Path(data)
    packed = path.suffix in ('.gz', '.zip', '.xz')
    if data == PYTHON_SOURCES or path.is_dir() or packed:
        name = path.resolve().name.removesuffix(path.suffix) if packed else path.resolve().name
        cached = folder / f'{name}.bin'
        if not cached.exists():
            folder.mkdir(parents=True, exist_ok=True)
            with atomically(cached) as file:
                if data == PYTHON_SOURCES:
                    _write_python_sources(file)
                elif path.suffix == '.xz':
                    with lzma.open(path) as source:
                        shutil.copyfileobj(source, file, BLOCK)
                else:
                    file.write(read(path))
        path = cached
    else:
        name = path.name
    if not path.is_file():
        raise SystemExit(f'--data {data}: no such file')
    return {'name': name, 'path': str(path.resolve()), 'bytes': path.stat().st_size, 'sha256': _sha256(path, folder)}


def _sha256(path: Path, folder: Path) -> str:
    """Return the SHA-256, cached by path, size and time of change."""
    known_file, stat = folder / 'sha256.json', path.stat()
    known = json.loads(known_file.read_text()) if known_file.exists() else {}
    key = f'{path.resolve()} {stat.st_size} {stat.st_mtime_ns}'
    if key not in known:
        digest = hashlib.sha256()
        with path.open('rb') as file:
            while block := file.read(BLOCK):
                digest.update(block)
        known[key] = digest.hexdigest()
        folder.mkdir(parents=True, exist_ok=True)
        known_file.write_text(json.dumps(known, indent=1))
    return known[key]


def _write_python_sources(file: Any) -> None:
    paths = {name: Path(sysconfig.get_path(name)) for name in ('stdlib', 'purelib', 'platlib')}
    files: dict[str, Path] = {}
    for name, root in paths.items():
        for path in root.rglob('*.py'):
            below = path.relative_to(root)
            if name == 'stdlib' and below.parts[0] in ('site-packages', 'dist-packages'):
                continue
            files[str(below)] = path
    left = PYTHON_SOURCES_BYTES
    for _, path in sorted(files.items()):
        try:
            content = path.read_bytes()[:left]
        except OSError:  # a dangling link, or an unreadable file
            continue
        file.write(content)
        left -= len(content)
        if not left:
            return


def load(path: str, size: int) -> dict[str, Tensor]:
    """Return the splits train, valid and test, 90, 5 and 5 percent: uint8, mapped from the file."""
    text = torch.from_file(path, shared=False, size=size, dtype=torch.uint8)
    cuts = [size * percent // 100 for percent in (90, 95)]
    return dict(zip(('train', 'valid', 'test'), text.tensor_split(cuts), strict=True))
