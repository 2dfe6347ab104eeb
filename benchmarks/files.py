"""Files that appear as a whole."""

from __future__ import annotations

import contextlib
import os
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO


@contextlib.contextmanager
def atomically(path: Path) -> Iterator[BinaryIO]:
    """Open a file that replaces `path` once all of it is on the disk; after an error `path` is as it was."""
    part = path.with_name(f'{path.name}.{uuid.uuid4().hex}.part')
    try:
        with part.open('xb') as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        os.replace(part, path)
    finally:
        part.unlink(missing_ok=True)
