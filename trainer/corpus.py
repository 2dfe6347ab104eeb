"""The text that the trainer reads: files, folders, enwik8 and its download, the standard library."""

from __future__ import annotations

import contextlib
import gzip
import hashlib
import http.client
import platform
import sysconfig
import urllib.error
import urllib.request
import zipfile
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from trainer.console import UserError, one_line, progress, say

DATA = Path(__file__).parents[1] / 'data'
ENWIK8_URL = 'http://mattmahoney.net/dc/enwik8.zip'
ENWIK8_BYTES = 100_000_000
ENWIK8_SHA256 = '2b49720ec4d78c3c9fabaee6e4179a5e997302b3a70029f30f2d582218c024a8'
STDLIB = f'python-{platform.python_version()}-stdlib'
STDLIB_MAX_BYTES = 32 * 2**20
UNPACKED_BYTES = 4 * 2**30
NETWORK_ERRORS = (urllib.error.URLError, http.client.HTTPException, TimeoutError, ConnectionError)


@dataclass(frozen=True)
class Corpus:
    name: str  # stands in every figure and file
    data: str  # the --data that finds it again
    sha256: str
    splits: dict[str, Tensor]  # train, valid, test: uint8 [bytes]


def load_corpus(data: str | None, folder: Path = DATA, url: str = ENWIK8_URL, limit: int = UNPACKED_BYTES) -> Corpus:
    """Load the text that --data names: a file, a folder or 'stdlib'.

    Args:
        data: None takes enwik8 from `folder` or the network, or else the standard library.
        limit: bytes that archives may unpack to.

    Raises:
        UserError: the text is empty, corrupt or larger than `limit`.
        OSError: it cannot be read.
    """
    data = data or find_enwik8(folder, url)
    if data == 'stdlib':
        name, content = STDLIB, read_stdlib()
    else:
        data = str(Path(data).resolve())
        name, content = Path(data).name.removesuffix('.gz').removesuffix('.zip'), read(Path(data), limit=limit)
    if not content:
        raise UserError(f'{data}: empty')
    sha256 = hashlib.sha256(content).hexdigest()
    if sha256 == ENWIK8_SHA256:
        name = 'enwik8'
    elif name == 'enwik8':
        raise UserError(f'{data}: truncated or corrupt: {unlike_enwik8(content)} (another text needs another name)')
    cuts = [len(content) * percent // 100 for percent in (90, 95)]  # of enwik8: 90, 5 and 5 million bytes
    splits = torch.frombuffer(bytearray(content), dtype=torch.uint8).tensor_split(cuts)
    return Corpus(name, data, sha256, dict(zip(('train', 'valid', 'test'), splits, strict=True)))


def read(path: Path, kind: str | None = None, limit: int = UNPACKED_BYTES) -> bytes:
    """Return a file, unpacked if its kind (or suffix) is .gz or .zip; of a folder, all files but hidden ones, in order.

    Raises:
        UserError: an archive is corrupt, or what it unpacks to has more than `limit` bytes.
        OSError: the file cannot be read.
    """
    if path.is_dir():
        below = sorted(p.relative_to(path) for p in path.rglob('*') if p.is_file())
        return b''.join(read(path / p, None, limit) for p in below if not any(part.startswith('.') for part in p.parts))
    kind = kind or path.suffix
    if kind not in ('.gz', '.zip'):
        return path.read_bytes()
    try:
        content = unpack(path, kind, limit)
    except Exception as error:  # zlib, lzma, zipfile and gzip raise many kinds on a damaged archive
        if isinstance(error, OSError) and error.errno is not None:  # the file itself cannot be read
            raise
        raise UserError(f'{path}: truncated or corrupt: {one_line(error)}') from error
    if len(content) > limit:
        raise UserError(f'{path}: unpacks to more than {limit / 2**30:g} GiB (--unpack-gib raises the limit)')
    return content


def unpack(path: Path, kind: str, limit: int) -> bytes:
    """Return the content of an archive, or its first `limit` + 1 bytes."""
    if kind == '.gz':
        with gzip.open(path) as file:
            return file.read(limit + 1)
    parts, size = [], 0
    with zipfile.ZipFile(path) as archive:
        for name in sorted(archive.namelist()):
            with archive.open(name) as file:
                parts.append(file.read(limit + 1 - size))
            size += len(parts[-1])
            if size > limit:
                break
    return b''.join(parts)


def unlike_enwik8(content: bytes) -> str:
    found = hashlib.sha256(content).hexdigest()
    if found == ENWIK8_SHA256:
        return ''
    return f'{len(content):,} bytes, SHA-256 {found[:8]}…, where enwik8 has {ENWIK8_BYTES:,}, {ENWIK8_SHA256[:8]}…'


def unlike_archive(path: Path) -> str:
    """Return how the directory of a zip differs from enwik8.zip, which holds one file of a known size, or ''."""
    try:
        with zipfile.ZipFile(path) as archive:
            found = {info.filename: info.file_size for info in archive.infolist()}
    except Exception as error:  # zipfile raises many kinds on a damaged archive
        return one_line(error)
    if found == {'enwik8': ENWIK8_BYTES}:
        return ''
    return f'a zip of {dict(list(found.items())[:3])}, where enwik8.zip has one file of {ENWIK8_BYTES:,} bytes'


def read_stdlib() -> bytes:
    """The .py files of the standard library in sorted order, without tests and installed packages."""
    root = Path(sysconfig.get_path('stdlib'))
    left_out = {'site-packages', 'dist-packages', 'test', 'tests', 'idle_test'}
    below = sorted(p.relative_to(root) for p in root.rglob('*.py'))
    return b''.join((root / p).read_bytes() for p in below if not left_out & set(p.parts))[:STDLIB_MAX_BYTES]


def find_enwik8(folder: Path, url: str) -> str:
    """Return the file in `folder`, downloaded if it is not there; 'stdlib', after a line, without a network.

    A download that stopped is continued, now or by the next call. It gets its name once its content is checked.
    """
    for path in (folder / 'enwik8.gz', folder / 'enwik8.zip', folder / 'enwik8'):
        if path.is_file():
            return str(path)
    part = folder / 'enwik8.zip.part'
    folder.mkdir(parents=True, exist_ok=True)
    try:
        while not download(url, part):
            pass
    except NETWORK_ERRORS as error:
        say(f"no network for {url} ({one_line(error)}): training on {STDLIB}, the sources of Python's standard library")
        return 'stdlib'
    try:
        wrong = unlike_archive(part) or unlike_enwik8(read(part, '.zip', ENWIK8_BYTES))
    except UserError as error:
        wrong = str(error)
    if wrong:
        part.unlink()
        raise UserError(f'{url}: corrupt download, removed: {wrong} (try again, or name a text with --data)')
    return str(part.rename(folder / 'enwik8.zip'))


def download(url: str, part: Path, timeout: float = 10) -> bool:
    """Append to `part` what the server has after its bytes.

    Returns:
        True if that was all, False if the connection ended before.

    Raises:
        One of NETWORK_ERRORS where the call added nothing; `UserError` where the server sends more than a packed
        enwik8 can have.
    """
    have = part.stat().st_size if part.exists() else 0
    request = urllib.request.Request(url, headers={'Range': f'bytes={have}-'} if have else {})
    try:
        response = urllib.request.urlopen(request, timeout=timeout)
    except urllib.error.HTTPError as error:
        if have and error.code == http.HTTPStatus.REQUESTED_RANGE_NOT_SATISFIABLE:  # nothing follows them
            return True
        raise
    with response:
        start = have if response.status == http.HTTPStatus.PARTIAL_CONTENT else 0  # other servers begin again
        length = response.headers['Content-Length']
        total = start + int(length) if length else None
        with part.open('ab' if start else 'wb') as file, progress('enwik8.zip', total, start, 'B') as bar:
            with contextlib.suppress(*NETWORK_ERRORS):
                while chunk := response.read(2**16):
                    if file.tell() + len(chunk) > ENWIK8_BYTES + 2**20:
                        part.unlink()
                        raise UserError(f'{url}: larger than enwik8, removed')
                    file.write(chunk)
                    bar.update(len(chunk))
            if file.tell() <= have:
                raise ConnectionError(f'the connection ended after {file.tell():,} bytes')
            return total is None or file.tell() >= total
