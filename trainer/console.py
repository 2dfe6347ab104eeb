"""Errors of the user, lines and bars on the terminal, signals."""

from __future__ import annotations

import contextlib
import signal
import sys
import textwrap
from collections.abc import Iterator
from typing import Any

from tqdm import tqdm

SIGNALS = (signal.SIGINT, signal.SIGTERM)


class UserError(Exception):
    """An error that the user can correct: printed in one line, exit code 2."""


class Interrupted(Exception):
    """Ctrl-C or SIGTERM arrived (the number is the argument), and the run stands between two steps."""


@contextlib.contextmanager
def as_user_error(*kinds: type[Exception], of: str = '') -> Iterator[None]:
    """Turn exceptions of these kinds into `UserError`, with `of` before the message."""
    try:
        yield
    except kinds as error:
        raise UserError(of + one_line(error)) from error


def one_line(error: BaseException) -> str:
    return textwrap.shorten(str(error), 240, placeholder=' …') or type(error).__name__


def say(text: str) -> None:
    tqdm.write(text)
    sys.stdout.flush()  # a pipe would hold it back


def progress(name: str, total: int | None, done: int, unit: str, leave: bool = True, shows: bool = True) -> tqdm:
    """Return a progress bar, hidden where stderr is no terminal."""
    scale = unit == 'B'
    return tqdm(
        desc=name, total=total, initial=done, unit=unit, unit_scale=scale, leave=leave, disable=None if shows else True
    )


def note_signals(received: list[int]) -> None:
    """Append the first Ctrl-C or SIGTERM to `received`, so that the run can save; the second ends the process."""

    def note(number: int, _: Any) -> None:
        received.append(number)
        for each in SIGNALS:
            signal.signal(each, signal.SIG_DFL)

    for each in SIGNALS:
        signal.signal(each, note)
