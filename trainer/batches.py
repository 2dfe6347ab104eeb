"""Bytes that a step and an evaluation read."""

from __future__ import annotations

import zlib
from collections.abc import Iterator

import torch
from torch import Tensor

from trainer.config import Config


def seeded(config: Config, use: str, step: int, device: torch.device | str = 'cpu') -> torch.Generator:
    """Depends on seed, use and step alone, so that a resumed run draws what an uninterrupted one draws."""
    return torch.Generator(device).manual_seed(zlib.crc32(f'{use} {config.seed} {step}'.encode()))


def draw(text: Tensor, config: Config, step: int) -> Tensor:
    """The data of a step from random places of uint8 text [N], int64 [grad_accum, batch, seq_len + 1]."""
    return text[draw_starts(len(text), config, step) + torch.arange(config.seq_len + 1)].long()


def draw_starts(length: int, config: Config, step: int) -> Tensor:
    """The starts of the sequences of a step in a text of this length, int64 [grad_accum, batch, 1]."""
    shape = (config.grad_accum, config.batch, 1)
    return torch.randint(length - config.seq_len, shape, generator=seeded(config, 'data', step))


def windows(text: Tensor, seq_len: int, batch: int) -> Iterator[Tensor]:
    """Cut uint8 text [N] into int64 [≤ batch, seq_len + 1] and a shorter rest; neighbours share one byte."""
    full = (len(text) - 1) // seq_len
    if full:
        for ids in text[: full * seq_len + 1].unfold(0, seq_len + 1, seq_len).split(batch):
            yield ids.long()
    if full * seq_len + 1 < len(text):
        yield text[full * seq_len :].long()[None]
