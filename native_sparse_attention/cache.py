"""The key/value cache of a layer and of a model: preallocated tensors that are written in place.

Rows of a batch have lengths of their own, kept on the device; the host keeps upper bounds alone, so appending never
waits for the device. What lies behind a row's length is never read.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from native_sparse_attention.geometry import num_compressed_blocks

# Tokens that a cache which grows holds at first, and tokens that `crop` takes back unless told otherwise.
FIRST_CAPACITY = 64
MAX_ROLLBACK = 32


class LayerCache:
    """What one attention layer keeps of the past.

    k `[B, capacity, H, D]`, v `[B, capacity, H, DV]`: keys after rotary, and values. With `compress=(l, d)` also k_cmp
    and v_cmp `[B, C + 1, H, D or DV]` (the last slot takes the candidate of an incomplete block), and rings raw_k and
    raw_v of the last l - 1 + max_rollback keys before rotary (`has_raw_k`) and values (`has_raw_v`) that the next
    compressed block needs; without a ring k or v themselves serve. With `has_window` the window branch has keys and
    values of its own, k_window and v_window.

    Args:
        batch_size, max_seq_len: rows and tokens per row. kv_heads, head_dim, value_dim: H, D, DV.
        max_rollback: tokens that `crop` can take back.
        compress: (l, d), or None for a layer without compressed keys.
        grows: past max_seq_len the tensors are made anew, twice as long, instead of an error.

    Attributes:
        lengths: int32 `[B]` on the device. max_length: host int, no row is longer. capacity: tokens per row.
    """

    def __init__(
        self,
        batch_size: int,
        max_seq_len: int,
        *,
        kv_heads: int,
        head_dim: int,
        value_dim: int,
        max_rollback: int = MAX_ROLLBACK,
        compress: tuple[int, int] | None = None,
        has_raw_k: bool = False,
        has_raw_v: bool = False,
        has_window: bool = False,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str | None = None,
        grows: bool = False,
    ) -> None:
        for name, value in (('batch_size', batch_size), ('max_seq_len', max_seq_len)):
            if not isinstance(value, int) or value < 1:
                raise ValueError(f'{name} is {value}, but must be an integer of at least 1')
        if not isinstance(max_rollback, int) or max_rollback < 0:
            raise ValueError(f'max_rollback is {max_rollback}, but must be an integer of at least 0')
        self.batch_size, self.max_rollback, self.compress, self.grows = batch_size, max_rollback, compress, grows
        # What a layer must agree with to use this cache.
        self.layout = {
            'kv_heads': kv_heads,
            'head_dim': head_dim,
            'value_dim': value_dim,
            'compress': compress,
            'has_raw_k': has_raw_k,
            'has_raw_v': has_raw_v,
            'has_window': has_window,
        }

        def zeros(tokens: int, dim: int) -> Tensor:
            with torch.inference_mode(False):  # tensors made under it could not be written outside
                return torch.zeros(batch_size, tokens, kv_heads, dim, dtype=dtype, device=device)

        self.k, self.v = zeros(max_seq_len, head_dim), zeros(max_seq_len, value_dim)
        self.k_window, self.v_window = (
            (zeros(max_seq_len, head_dim), zeros(max_seq_len, value_dim)) if has_window else (None, None)
        )
        self.k_cmp = self.v_cmp = self.raw_k = self.raw_v = None
        if compress is not None:
            block_size, stride = compress
            slots = num_compressed_blocks(max_seq_len, block_size, stride) + 1
            self.k_cmp, self.v_cmp = zeros(slots, head_dim), zeros(slots, value_dim)
            ring = max(1, block_size - 1 + max_rollback)
            self.raw_k = zeros(ring, head_dim) if has_raw_k else None
            self.raw_v = zeros(ring, value_dim) if has_raw_v else None
        with torch.inference_mode(False):
            self.lengths = torch.zeros(batch_size, dtype=torch.int32, device=device)
        self.max_length = 0
        # The longest that each row has been since it was empty, and the host's bound on all: what lies a ring's size
        # before it is lost, even if the row has been cropped since.
        with torch.inference_mode(False):
            self._peaks = torch.zeros_like(self.lengths)
        self._peak = 0

    @property
    def capacity(self) -> int:
        return self.k.shape[1]

    @property
    def dtype(self) -> torch.dtype:
        return self.k.dtype

    @property
    def device(self) -> torch.device:
        return self.k.device

    def reserve(self, num_tokens: int) -> None:
        """Make sure that `num_tokens` more fit; raises ValueError, with nothing written, where they may not."""
        needed = self.max_length + num_tokens
        if needed <= self.capacity:
            return
        if not self.grows:
            raise ValueError(
                f'the cache holds up to {self.max_length} tokens a row and gets {num_tokens} more, but its capacity is '
                f'{self.capacity}: pass a larger max_seq_len to init_cache'
            )
        capacity = self.capacity
        while capacity < needed:
            capacity *= 2
        self._grow(capacity)

    def positions(self, num_tokens: int) -> Tensor:
        """int64 `[B, num_tokens]`: positions of the next tokens of every row."""
        return self.lengths.long()[:, None] + torch.arange(num_tokens, device=self.device)

    def block_candidates(self, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """The compressed blocks that new tokens may complete, before they are appended.

        k, v: `[B, T, H, D]`, `[B, T, H, DV]`: the new keys before rotary and the new values. Returns the indices int64
        `[B, K]` of the blocks, K the most that T tokens can complete, and their tokens `[B, K, l, H, D]`,
        `[B, K, l, H, DV]`; those of a block that stays incomplete are meaningless.
        """
        assert self.compress is not None
        block_size, stride = self.compress
        num_tokens = k.shape[1]
        longest = num_compressed_blocks(self.max_length + num_tokens, block_size, stride)
        num_candidates = min(-(-num_tokens // stride), longest)
        old = self.lengths.long()
        first_block = num_compressed_blocks(old, block_size, stride)
        blocks = first_block[:, None] + torch.arange(num_candidates, device=self.device)
        # [B, K, l]: where each token stands in the history of l - 1 old tokens and the new ones.
        history_start = old - (block_size - 1)
        token = blocks[..., None] * stride + torch.arange(block_size, device=self.device) - history_start[:, None, None]
        token = token.clamp(0, block_size - 2 + num_tokens)
        row = torch.arange(self.batch_size, device=self.device)[:, None, None]
        history = history_start[:, None] + torch.arange(block_size - 1, device=self.device)
        raw_k, raw_v = (
            torch.cat((_read(ring, full, history), new.to(self.dtype)), 1)[row, token]
            for ring, full, new in ((self.raw_k, self.k, k), (self.raw_v, self.v, v))
        )
        return blocks, raw_k, raw_v

    def append(
        self,
        k: Tensor,
        v: Tensor,
        *,
        counts: Tensor | None = None,
        k_window: Tensor | None = None,
        v_window: Tensor | None = None,
        raw_k: Tensor | None = None,
        raw_v: Tensor | None = None,
        compressed: tuple[Tensor, Tensor, Tensor] | None = None,
    ) -> None:
        """Write new tokens behind every row and advance its length.

        k, k_window, raw_k: `[B, T, H, D]`; v, v_window, raw_v: `[B, T, H, DV]`. counts: int32 `[B]`, how many of the T
        are real (default all); the rest must stand behind them. compressed: the indices of `block_candidates` with the
        compressed keys `[B, K, H, D]` and values `[B, K, H, DV]` of those blocks.
        """
        num_tokens = k.shape[1]
        assert self.max_length + num_tokens <= self.capacity, 'reserve first'
        old = self.lengths.long()
        new = old + (num_tokens if counts is None else counts)
        row, position = torch.arange(self.batch_size, device=self.device)[:, None], self.positions(num_tokens)
        for tensor, tokens in (
            (self.k, k),
            (self.v, v),
            (self.k_window, k_window),
            (self.v_window, v_window),
        ):
            if tensor is not None and tokens is not None:
                tensor[row, position] = tokens.to(self.dtype)
        for ring, tokens in ((self.raw_k, raw_k), (self.raw_v, raw_v)):
            if ring is not None and tokens is not None:
                _write_ring(ring, tokens.to(self.dtype), old, new)
        if compressed is not None and self.k_cmp is not None and self.v_cmp is not None:
            block, k_cmp, v_cmp = compressed
            self.k_cmp[row, block] = k_cmp.to(self.dtype)
            self.v_cmp[row, block] = v_cmp.to(self.dtype)
        self.lengths.copy_(new)
        self._peaks.copy_(torch.maximum(self._peaks, self.lengths))
        self.advance(num_tokens)

    def advance(self, num_tokens: int) -> None:
        """The host's half of an append, for whoever replays the device's half alone, as a CUDA graph does."""
        self.max_length += num_tokens
        self._peak = max(self._peak, self.max_length)

    def reset(self) -> None:
        """Forget everything; the tensors stay."""
        self.lengths.zero_()
        self._peaks.zero_()
        self.max_length = self._peak = 0

    def reorder(self, index: Tensor) -> None:
        """Row b becomes what row index[b] is, as beam search needs it. index: int64 `[B]`."""
        if index.shape != (self.batch_size,) or index.dtype not in (torch.int32, torch.int64):
            raise ValueError(
                f'index has shape {tuple(index.shape)} and dtype {index.dtype}, but must be integers '
                f'[{self.batch_size}]'
            )
        for tensor in (self.lengths, self._peaks, *self._tensors()):
            tensor.copy_(tensor.index_select(0, index))

    def crop(self, length: int | Tensor, *, max_length: int | None = None) -> None:
        """Keep the first `length` tokens of every row that is longer, as speculative decoding needs it.

        length: an int, or an integer tensor `[B]` of one length per row. max_length: for a tensor, the host's bound on
        the longest row afterwards (default: the longest on CPUs; on a GPU the bound stays, so give it there). Except to
        0, at most `max_rollback` tokens behind the longest that a row has been can be taken back: ValueError beyond
        (the content of a tensor is checked on CPUs only, since reading it on a GPU waits for the device).
        """
        if isinstance(length, Tensor):
            if length.shape != (self.batch_size,) or length.dtype not in (torch.int32, torch.int64):
                raise ValueError(
                    f'length has shape {tuple(length.shape)} and dtype {length.dtype}, but must be an int or integers '
                    f'[{self.batch_size}]'
                )
            if self.lengths.is_cpu:
                for row in zip(length.tolist(), self.lengths.tolist(), self._peaks.tolist(), strict=True):
                    self._check_rollback(*row)
            if max_length is not None and max_length < 0:
                raise ValueError(f'max_length is {max_length}, but must be at least 0')
            self.lengths.copy_(torch.minimum(self.lengths, length.to(self.lengths)))
            if max_length is None:
                max_length = int(self.lengths.max()) if self.lengths.is_cpu else self.max_length
            bound = max_length
        else:
            self._check_rollback(length, self.max_length, self._peak)
            bound = length
            self.lengths.clamp_(max=length)
        self._peaks.masked_fill_(self.lengths == 0, 0)
        self.max_length = min(self.max_length, bound)
        if self.max_length == 0:
            self._peak = 0

    def _check_rollback(self, length: int, held: int, peak: int) -> None:
        if length < 0:
            raise ValueError(f'length is {length}, but must be at least 0')
        if 0 < length < min(held, peak - self.max_rollback):
            raise ValueError(
                f'length is {length}, but the cache has held {peak} tokens and max_rollback is {self.max_rollback}: '
                f'crop to at least {peak - self.max_rollback}, or to 0'
            )

    def _tensors(self) -> list[Tensor]:
        names = ('k', 'v', 'k_window', 'v_window', 'k_cmp', 'v_cmp', 'raw_k', 'raw_v')
        return [tensor for tensor in (getattr(self, name) for name in names) if tensor is not None]

    def _grow(self, capacity: int) -> None:
        for name in ('k', 'v', 'k_window', 'v_window'):
            setattr(self, name, _longer(getattr(self, name), capacity))
        if self.compress is not None:
            slots = num_compressed_blocks(capacity, *self.compress) + 1
            self.k_cmp, self.v_cmp = _longer(self.k_cmp, slots), _longer(self.v_cmp, slots)


class ModelCache(Sequence[LayerCache]):
    """The caches of a model's layers, advanced together by the model's forward."""

    def __init__(self, layers: list[LayerCache]) -> None:
        if not layers:
            raise ValueError('layers is empty, but a model has at least one layer')
        self.layers = layers

    def __len__(self) -> int:
        return len(self.layers)

    def __getitem__(self, index):
        return self.layers[index]

    def __iter__(self) -> Iterator[LayerCache]:
        return iter(self.layers)

    @property
    def lengths(self) -> Tensor:
        return self.layers[0].lengths

    @property
    def max_length(self) -> int:
        return self.layers[0].max_length

    @property
    def capacity(self) -> int:
        return self.layers[0].capacity

    @property
    def batch_size(self) -> int:
        return self.layers[0].batch_size

    def reserve(self, num_tokens: int) -> None:
        for layer in self.layers:
            layer.reserve(num_tokens)

    def advance(self, num_tokens: int) -> None:
        for layer in self.layers:
            layer.advance(num_tokens)

    def reset(self) -> None:
        for layer in self.layers:
            layer.reset()

    def reorder(self, index: Tensor) -> None:
        for layer in self.layers:
            layer.reorder(index)

    def crop(self, length: int | Tensor, *, max_length: int | None = None) -> None:
        for layer in self.layers:
            layer.crop(length, max_length=max_length)


def _read(ring: Tensor | None, full: Tensor, position: Tensor) -> Tensor:
    """Old tokens at positions `[B, n]`, from the ring where there is one; negative positions give anything."""
    row = torch.arange(full.shape[0], device=full.device)[:, None]
    return full[row, position.clamp(0, full.shape[1] - 1)] if ring is None else ring[row, position % ring.shape[1]]


def _write_ring(ring: Tensor, tokens: Tensor, old: Tensor, new: Tensor) -> None:
    """Write positions [old, new), p into slot p mod R; a slot takes the latest that falls on it, or stays."""
    if tokens.shape[1] == 0:
        return
    size = ring.shape[1]
    last = (new - 1)[:, None]
    latest = last - (last - torch.arange(size, device=ring.device)) % size
    source = latest - old[:, None]
    row = torch.arange(ring.shape[0], device=ring.device)[:, None]
    written = tokens[row, source.clamp(0, tokens.shape[1] - 1)]
    ring.copy_(torch.where((source >= 0)[..., None, None], written, ring))


def _longer(tensor: Tensor | None, tokens: int) -> Tensor | None:
    if tensor is None:
        return None
    with torch.inference_mode(False):
        longer = tensor.new_zeros(tensor.shape[0], tokens, *tensor.shape[2:])
    longer[:, : tensor.shape[1]] = tensor
    return longer
