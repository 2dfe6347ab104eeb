"""Synthetic retrieval problems: associative recall, and one needle at a given depth.

A sequence is a body of random filler tokens with key-value pairs at random places, a question mark, and questions: keys
of the body, each followed by its value. A value is right where the token before it predicts it, so only the body can
tell it. Keys, values and filler have separate ids, and the values of every sequence are drawn anew.

Dimensions: B sequences, L tokens that the model reads, P pairs in the body, Q questions, K ids of key tokens and as
many of value tokens.
"""

from __future__ import annotations

import zlib
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

IGNORED = -100
QUESTION = 0
MAX_KEYS = 2**16


class Batch(NamedTuple):
    """ids: int64 `[B, L]`. labels: int64 `[B, L]`, the next token where an answer follows, elsewhere IGNORED."""

    ids: Tensor
    labels: Tensor


@dataclass(frozen=True)
class Task:
    """Sizes of the problems.

    num_tokens: vocabulary: the question mark, then 3/8 key ids, 3/8 value ids, and filler ids. key_tokens,
    value_tokens: length of a key and of a value. pairs: P. queries: Q, each of another key.

    Raises:
        ValueError: for sizes that do not fit.
    """

    num_tokens: int = 256
    key_tokens: int = 1
    value_tokens: int = 1
    pairs: int = 64
    queries: int = 32

    def __post_init__(self) -> None:
        for name in ('key_tokens', 'value_tokens', 'pairs', 'queries'):
            if getattr(self, name) < 1:
                raise ValueError(f'{name} is {getattr(self, name)}, but must be at least 1')
        if self.num_tokens < 8:
            raise ValueError(f'num_tokens is {self.num_tokens}, but must be at least 8')
        if self.num_keys > MAX_KEYS:
            raise ValueError(f'key_tokens is {self.key_tokens}: {self.num_keys:,} keys, but at most {MAX_KEYS:,} work')
        if self.pairs > self.num_keys:
            raise ValueError(f'pairs is {self.pairs}, but must be at most {self.num_keys}, the number of keys')
        if self.queries > self.pairs:
            raise ValueError(f'queries is {self.queries}, but must be at most pairs, {self.pairs}')

    @property
    def alphabet(self) -> int:
        """K. Key ids are 1 … K, value ids K + 1 … 2K, filler ids follow."""
        return (self.num_tokens - 1) * 3 // 8

    @property
    def num_keys(self) -> int:
        return self.alphabet**self.key_tokens

    @property
    def width(self) -> int:
        return self.key_tokens + self.value_tokens

    def body_length(self, length: int, queries: int) -> int:
        """Tokens before the question mark: with it and the questions, length + 1 tokens stand in a sequence."""
        return length - queries * self.width

    def check(self, length: int) -> None:
        least = (self.pairs + self.queries) * self.width
        if length < least:
            raise ValueError(
                f'length is {length}, but must be at least {least} for {self.pairs} pairs and {self.queries} queries'
            )


def seeded(device: torch.device, *of: object) -> torch.Generator:
    """Return a generator on the device that depends on `of` alone, such as a use, a seed and a step."""
    return torch.Generator(device).manual_seed(zlib.crc32(' '.join(map(str, of)).encode()))


def make_recall(task: Task, batch: int, length: int, generator: torch.Generator, repeats: int = 0) -> Batch:
    """Associative recall: P pairs at random places of the body, then Q questions.

    repeats: so many of the P pairs repeat another pair of the body. The value of every later occurrence has a label
    too, which gives answers at all distances.

    Raises:
        ValueError: if the length is too small, or `repeats` leaves fewer keys than questions.
    """
    task.check(length)
    distinct = task.pairs - repeats
    if not (repeats >= 0 and distinct >= task.queries):
        raise ValueError(f'repeats is {repeats}, but must lie in [0, {task.pairs - task.queries}], pairs - queries')
    device = generator.device
    keys = draw_distinct(batch, task.num_keys, distinct, generator)
    values = torch.randint(task.alphabet, (batch, distinct, task.value_tokens), generator=generator, device=device)
    # Pair of each place, [B, P]: every pair once, and `repeats` of them again, in random order.
    pair = torch.arange(distinct, device=device).expand(batch, -1)
    if repeats:
        again = torch.randint(distinct, (batch, repeats), generator=generator, device=device)
        order = draw_distinct(batch, task.pairs, task.pairs, generator)
        pair = torch.cat((pair, again), 1).gather(1, order)
    place = torch.arange(task.pairs, device=device).expand(batch, -1)
    first = torch.full_like(keys, task.pairs).scatter_reduce(1, pair, place, 'amin')
    # Places that leave room for a whole pair, [B, P].
    spare = task.body_length(length, task.queries) - task.pairs * (task.width - 1)
    start = draw_distinct(batch, spare, task.pairs, generator).sort(1).values + place * (task.width - 1)
    asked = draw_distinct(batch, distinct, task.queries, generator)
    return write(task, length, start, pair, first.gather(1, pair) != place, asked, keys, values, generator)


def make_needle(task: Task, depth: Tensor, length: int, generator: torch.Generator) -> Batch:
    """One pair at `depth` (float `[B]`, 0: the body begins with it, 1: it ends with it), then its key."""
    task.check(length)
    batch, device = len(depth), generator.device
    keys = torch.randint(task.num_keys, (batch, 1), generator=generator, device=device)
    values = torch.randint(task.alphabet, (batch, 1, task.value_tokens), generator=generator, device=device)
    start = (depth.to(device) * (task.body_length(length, 1) - task.width)).round().long()[:, None]
    only = torch.zeros_like(start)
    return write(task, length, start, only, only.bool(), only, keys, values, generator)


def draw_distinct(batch: int, size: int, count: int, generator: torch.Generator) -> Tensor:
    """`count` distinct numbers below `size` in random order, int64 `[B, count]`."""
    return torch.rand(batch, size, generator=generator, device=generator.device).topk(count, 1).indices


def write(
    task: Task,
    length: int,
    start: Tensor,
    pair: Tensor,
    is_repeat: Tensor,
    asked: Tensor,
    keys: Tensor,
    values: Tensor,
    generator: torch.Generator,
) -> Batch:
    """The sequences with pair[b, p] at start[b, p] and questions for the pairs asked[b, q].

    keys: int64 `[B, N]` below num_keys; values: int64 `[B, N, value_tokens]` below K. `start`, `pair` and `is_repeat`
    are `[B, P]`, `asked` `[B, Q]`.
    """
    batch, queries, device = len(start), asked.shape[1], generator.device
    filler = (2 * task.alphabet + 1, task.num_tokens)
    ids = torch.randint(*filler, (batch, length + 1), generator=generator, device=device)
    digits = task.alphabet ** torch.arange(task.key_tokens, device=device)
    pairs = torch.cat((1 + keys[..., None] // digits % task.alphabet, 1 + task.alphabet + values), 2)  # [B, N, width]
    body = task.body_length(length, queries)
    question = body + 1 + task.width * torch.arange(queries, device=device).expand(batch, -1)
    offset = torch.arange(task.width, device=device)
    position = (torch.cat((start, question), 1)[..., None] + offset).flatten(1)
    which = torch.cat((pair, asked), 1)
    tokens = pairs.gather(1, which[..., None].expand(-1, -1, task.width))
    ids[:, body] = QUESTION
    ids.scatter_(1, position, tokens.flatten(1))
    answered = torch.cat((is_repeat, torch.ones_like(asked, dtype=torch.bool)), 1)[..., None]
    labels = torch.where(answered & (offset >= task.key_tokens), tokens, IGNORED).flatten(1)
    labels = torch.full_like(ids, IGNORED).scatter_(1, position, labels)
    return Batch(ids[:, :-1], labels[:, 1:])


def is_right(logits: Tensor, labels: Tensor, value_tokens: int) -> Tensor:
    """Return bool `[answers]`: all tokens of the value are the likeliest ones. logits `[B, L, num_tokens]`."""
    answers = labels != IGNORED
    return (logits.argmax(-1) == labels)[answers].view(-1, value_tokens).all(1)
