"""The lengths of the rows of a cache: exact on the device, bounded on the host."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from native_sparse_attention.core.checks import check_not_negative, check_positive, check_tensors, is_readable

SHOWN_ROWS = 8  # lengths that repr lists; of more rows it gives the range


class Crop(NamedTuple):
    """A crop that was checked.

    length: an int, or integers `[B]`, the limit of each row. max_length, peak: the host's bounds afterwards, on the
    rows and on the longest that they have been.
    """

    length: int | Tensor
    max_length: int
    peak: int


class RowLengths:
    """How many tokens each row holds and has held.

    Attributes:
        lengths: int32 `[B]` on the device.
        max_length: int on the host; no row is longer.
        max_rollback: tokens that `crop` can take back, or None for all.
        row_crops: crops to a length per row since the cache was empty, which max_length does not show.
    """

    def __init__(self, batch_size: int, max_rollback: int | None, device: Any) -> None:
        self.batch_size, self.max_rollback = batch_size, max_rollback
        # int32 [B]: the longest that each row has been since it was empty. Rings are overwritten up to there, even if
        # the row has been cropped since. _peak is the host's bound on all of them.
        self.lengths, self._peaks = (zeros((batch_size,), torch.int32, device) for _ in range(2))
        self.max_length = self._peak = self.row_crops = 0

    def advance(self, num_tokens: int) -> None:
        """Move the host's bounds by `num_tokens`, as an append does.

        For users of CUDA graphs: a replay moves `lengths` on the device only, so call `reserve` before it and `advance`
        after it, with the tokens that it appends.
        """
        self.max_length += num_tokens
        self._peak = max(self._peak, self.max_length)

    def reset(self) -> None:
        """Empty every row; the tensors stay allocated."""
        self.lengths.zero_()
        self._peaks.zero_()
        self.max_length = self._peak = self.row_crops = 0

    def crop(self, length: int | Tensor, *, max_length: int | None = None) -> None:
        """Keep the first `length` tokens of every longer row, as speculative decoding needs it.

        A row can be cropped to 0, or by at most `max_rollback` tokens from the longest that it has been.

        Args:
            length: an int, or int32 or int64 `[B]`, one length per row.
            max_length: with a tensor only: the host's bound on the longest row afterwards. Default: the longest row on
                a CPU; on a GPU the bound stays as it is.

        Raises:
            ValueError: a length beyond `max_rollback`, or a max_length that a row exceeds; nothing is cropped then. On
                a GPU the content of a tensor is not checked, because reading it waits for the device. An int is checked
                by the host's bounds; only where they do not allow it are the lengths read.
        """
        self.apply_crop(self.plan_crop(length, max_length))

    def plan_crop(self, length: int | Tensor, max_length: int | None, *, reads: bool = False) -> Crop:
        """Check the arguments of `crop` and change nothing. reads: check the content of a tensor on a GPU too."""
        check_crop(self.batch_size, length, max_length)
        on_cpu = self.lengths.is_cpu
        if not isinstance(length, Tensor):
            if not on_cpu and self._refusal(length, self.max_length, self._peak) is None:
                return Crop(length, length, self._peak)
            # The bounds of the host are too large where a mask left rows shorter than the tokens of a call.
            return Crop(length, *self._check_rows([length] * self.batch_size))
        if not (on_cpu or reads):
            return Crop(length, self.max_length if max_length is None else max_length, self._peak)
        longest, peak = self._check_rows(length.tolist())
        if max_length is not None and max_length < longest:
            raise ValueError(f'max_length is {max_length}, but must be at least {longest}, the longest row')
        return Crop(length, longest if max_length is None else max_length, peak)

    def apply_crop(self, crop: Crop) -> None:
        if isinstance(crop.length, Tensor):
            self.lengths.copy_(torch.minimum(self.lengths, crop.length.to(self.lengths)))
            self.row_crops += 1
        else:
            self.lengths.clamp_(max=crop.length)
        self.set_bounds(min(self.max_length, crop.max_length), crop.peak)

    def set_bounds(self, max_length: int, peak: int) -> None:
        """Set the host's bounds; rows that are empty forget what they have held."""
        self._peaks.masked_fill_(self.lengths == 0, 0)
        self.max_length, self._peak = max_length, peak if max_length else 0
        self.row_crops = self.row_crops if max_length else 0

    def _check_rows(self, lengths: list[int]) -> tuple[int, int]:
        """Raise ValueError where row b cannot be cropped to lengths[b]; waits for the device.

        Returns the longest row afterwards, and the longest that a row has been.
        """
        if self.lengths.is_meta:
            rows = [(self.max_length, self._peak)] * self.batch_size
        else:
            rows = list(zip(self.lengths.tolist(), self._peaks.tolist(), strict=True))
        for length, (held, peak) in zip(lengths, rows, strict=True):
            refusal = self._refusal(length, held, peak)
            if refusal is not None:
                raise ValueError(refusal)
        longest = max(min(length, held) for length, (held, _) in zip(lengths, rows, strict=True))
        return longest, max(peak for _, peak in rows)

    def _refusal(self, length: int, held: int, peak: int) -> str | None:
        """Return the reason why a row of `held` tokens that once had `peak` cannot be cropped to length, or None."""
        if length < 0:
            return f'length is {length}, but must be at least 0'
        if self.max_rollback is None or length == 0 or length >= min(held, peak - self.max_rollback):
            return None
        return (
            f'length is {length}, but the cache has held {peak} tokens and max_rollback is {self.max_rollback}: '
            f'crop to at least {peak - self.max_rollback}, or to 0'
        )

    def _shown_lengths(self) -> str:
        """Return the lengths for `repr`; waits for the device, unless a CUDA graph is being captured."""
        if self.lengths.is_meta or is_captured(self.lengths):
            return f'up to {self.max_length}'
        lengths = self.lengths.tolist()
        return str(lengths) if len(lengths) <= SHOWN_ROWS else f'{min(lengths)} to {max(lengths)}'


def check_crop(batch_size: int, length: int | Tensor, max_length: int | None) -> None:
    """Check types, shapes and ranges of the arguments of `crop`, without reading a tensor."""
    if not isinstance(length, Tensor):
        if max_length is not None:
            raise ValueError(f'max_length is {max_length}, but must be left out where length is an int')
        return check_not_negative(length=length)
    if max_length is not None:
        check_not_negative(max_length=max_length)
    if length.shape != (batch_size,) or length.dtype not in (torch.int32, torch.int64):
        raise ValueError(
            f'length has shape {tuple(length.shape)} and dtype {length.dtype}, but must be an int or integers '
            f'[{batch_size}]'
        )
    return None


def checked_index(index: Tensor, batch_size: int, count: int | None = None) -> Tensor:
    """Check indices of the rows of a batch, `count` of them or at least 1, and return them."""
    check_tensors(index=index)
    fits = index.dim() == 1 and (len(index) == count if count is not None else len(index) > 0)
    if not fits or index.dtype not in (torch.int32, torch.int64):
        rule = '[N], N at least 1' if count is None else f'[{count}]'
        raise ValueError(f'index has shape {tuple(index.shape)} and dtype {index.dtype}, but must be integers {rule}')
    if is_readable(index) and ((index < 0) | (index >= batch_size)).any():
        raise ValueError(f'index is {index.tolist()}, but must be rows from 0 to {batch_size - 1}')
    return index


def repeated_rows(batch_size: int, repeats: int) -> Tensor:
    """Return int64 `[batch_size * repeats]`: each row `repeats` times, next to each other."""
    check_positive(repeats=repeats)
    return torch.arange(batch_size, device='cpu').repeat_interleave(repeats)


def is_captured(tensor: Tensor) -> bool:
    """Return whether a CUDA graph is being captured on the device of the tensor."""
    return tensor.is_cuda and torch.cuda.is_current_stream_capturing()


def zeros(shape: tuple[int, ...], dtype: torch.dtype, device: Any) -> Tensor:
    with torch.inference_mode(False):  # tensors made under it could not be written outside
        return torch.zeros(shape, dtype=dtype, device=device)
