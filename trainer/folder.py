"""The folder of a run: atomic writes, the lock, the log and the checkpoint."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import re
import socket
import time
import uuid
from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path
from typing import Any, BinaryIO

import torch

from trainer.config import Config
from trainer.console import UserError, one_line

CHECKPOINT = 'checkpoint.pt'
LOG = 'log.jsonl'
LOCK = 'lock'
TENSORS = 'tensors-'  # start of the names of folders
PART = '.part'
MAX_READS = 100  # of the text of a lock, 10 ms apart
STATE_KEYS = (
    'config', 'preset', 'corpus', 'prompt', 'tensors', 'random', 'random_cuda', 'step', 'seconds', 'recent', 'rows',
    'finished',
)  # fmt: skip


@contextlib.contextmanager
def atomically(path: Path) -> Iterator[BinaryIO]:
    """Open a file that replaces `path` once all of it is on the disk. After an error it is removed."""
    part = path.with_name(f'{path.name}.{uuid.uuid4().hex}{PART}')
    try:
        with part.open('xb') as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        os.replace(part, path)
    finally:
        part.unlink(missing_ok=True)


def write_atomically(path: Path, content: bytes) -> None:
    """Replace `path` by `content` once all of it is on the disk.

    Raises:
        OSError: names `path`. The partial file is removed and `path` is as it was.
    """
    try:
        with atomically(path) as file:
            file.write(content)
    except OSError as error:
        raise OSError(error.errno, error.strerror or one_line(error), str(path)) from error


def append_row(folder: Path, row: dict[str, Any]) -> None:
    """Add a line to the log. A line that does not fit on the disk is taken back, and the `OSError` names the log."""
    path = folder / LOG
    before = path.stat().st_size if path.exists() else 0
    try:
        with path.open('ab') as file:
            file.write(encode_rows([row]))
    except OSError as error:
        with contextlib.suppress(OSError):
            os.truncate(path, before)
        raise OSError(error.errno, error.strerror or one_line(error), str(path)) from error


def encode_rows(rows: list[dict[str, Any]]) -> bytes:
    return b''.join(json.dumps(row).encode() + b'\n' for row in rows)


def read_rows(folder: Path) -> list[dict[str, Any]]:
    """Return the rows of a log. A last line without its end, left by a killed process, is skipped."""
    path = folder / LOG
    if not path.is_file():
        raise UserError(f'{path}: no such log')
    *lines, _ = path.read_bytes().split(b'\n')
    try:
        rows = [json.loads(line) for line in lines]
    except ValueError as error:
        raise UserError(f'{path}: not a log: {one_line(error)}') from error
    if not all(isinstance(row, dict) for row in rows):
        raise UserError(f'{path}: not a log: a line is no JSON object')
    return rows


@contextlib.contextmanager
def lock_run(folder: Path) -> Iterator[None]:
    """Hold the lock of a run, and remove partial files that a killed process left.

    The kernel releases a `flock` when its process ends, however it ends, so a lock file without a living holder is
    taken over. The file names the process and the host for the message of the second process.

    Raises:
        UserError: another process holds the run.
    """
    path = folder / LOCK
    while True:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            with contextlib.suppress(FileNotFoundError):
                # Another process may have removed the file between opening and locking it.
                if os.fstat(descriptor).st_ino == path.stat().st_ino:
                    break
        except BlockingIOError:
            holder = _holder(descriptor)
            os.close(descriptor)
            raise UserError(f'{folder}: in use by {holder} (--name starts another run)') from None
        except BaseException:
            os.close(descriptor)
            raise
        os.close(descriptor)
    try:
        for part in folder.glob(f'*{PART}'):
            part.unlink(missing_ok=True)
        with contextlib.suppress(OSError):  # the text is for the message only, so a full disk does not matter here
            os.ftruncate(descriptor, 0)
            os.pwrite(descriptor, f'process {os.getpid()} on {socket.gethostname()}'.encode(), 0)
        yield
    finally:
        path.unlink(missing_ok=True)
        os.close(descriptor)


def _holder(descriptor: int) -> str:
    """Return the text of a lock file that is held, waiting until its holder has replaced that of a dead process."""
    for _ in range(MAX_READS):
        text = os.pread(descriptor, 1000, 0).decode(errors='replace')
        named = re.fullmatch(r'process (\d+) on (.+)', text)
        if named and (named[2] != socket.gethostname() or _is_alive(int(named[1]))):
            return text
        time.sleep(0.01)
    return 'another process'


def _is_alive(process: int) -> bool:
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        pass
    return True


def run_folder(runs_dir: Path, name: str) -> Path:
    """Return the folder of a run. Raises `UserError` if the name leads out of `runs_dir`."""
    folder = runs_dir / name
    root = runs_dir.resolve()
    if root not in folder.resolve().parents:
        raise UserError(f'--name {name}: leaves --runs-dir {runs_dir}')
    return folder


def refuse_existing(folder: Path) -> None:
    """Raise `UserError` unless a new run may start here: nothing, or what a death before the first save left."""
    if not os.path.lexists(folder):
        return
    left = [p.name for p in folder.iterdir()] if folder.is_dir() and not folder.is_symlink() else [folder.name]
    if any(name not in (LOG, LOCK) and not name.startswith(TENSORS) and not name.endswith(PART) for name in left):
        raise UserError(f'{folder}: exists already (--resume continues it, --name starts another run)')


def claim_run(folder: Path, locks: contextlib.ExitStack) -> None:
    """Make the folder of a new run and hold its lock until `locks` closes."""
    folder.mkdir(parents=True, exist_ok=True)
    locks.enter_context(lock_run(folder))
    refuse_existing(folder)  # another process may have started it meanwhile


def find_run(runs_dir: Path, start: str) -> Path | None:
    """Return the only run whose name begins with `start`, or None without one.

    Raises:
        UserError: there are several.
    """
    found = sorted(p.parent for p in runs_dir.glob(f'*/{CHECKPOINT}') if p.parent.name.startswith(start))
    if len(found) > 1:
        raise UserError(f'--name: needed, since there are {", ".join(p.name for p in found)} in {runs_dir}')
    return found[0] if found else None


def load_checkpoint(folder: Path) -> dict[str, Any]:
    """Return the state of a run, with `config` as a `Config`.

    Raises:
        UserError: there is no checkpoint, or it cannot be read, or it lacks a key.
    """
    path = folder / CHECKPOINT
    if not path.is_file():
        others = ', '.join(sorted(p.parent.name for p in folder.parent.glob(f'*/{CHECKPOINT}'))) or 'none'
        raise UserError(f'{path}: no such checkpoint (runs that have one: {others})')
    try:
        state = torch.load(path, map_location='cpu', weights_only=True)
        missing = [key for key in STATE_KEYS if key not in state]
        missing += [f'corpus.{key}' for key in ('name', 'data', 'sha256') if not missing and key not in state['corpus']]
        if missing:
            raise KeyError(f'no {", ".join(missing)}')
        config = Config(**state['config'])
        # A switch that is off by default may be younger than the run.
        lacking = sorted({f.name for f in fields(Config) if f.default is not False} - set(state['config']))
        if lacking:
            raise KeyError(f'no config.{", config.".join(lacking)}')
        return {**state, 'config': config}
    except Exception as error:  # torch.load raises many kinds on a damaged file
        raise UserError(f'{path}: truncated, corrupt or of another version: {one_line(error)}') from error
