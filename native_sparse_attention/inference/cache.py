"""The key/value cache of a layer and of a model: preallocated tensors that are written in place.

Rows of a batch have lengths of their own, kept on the device; the host keeps upper bounds alone, so appending never
waits for the device. What lies behind a row's length is never read.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from native_sparse_attention.core.checks import (
    check_block_sizes,
    check_flags,
    check_float_dtype,
    check_not_negative,
    check_positive,
    check_tensors,
    shown,
)
from native_sparse_attention.core.geometry import num_compressed_blocks
from native_sparse_attention.ops.decoding.step import Storage

# Tokens that a cache which grows holds at first, and tokens that `crop` takes back unless told otherwise.
FIRST_CAPACITY = 64
MAX_ROLLBACK = 32
# Different steps that a cache remembers the launches of.
MAX_LAUNCHES = 16

TOKENS = ('k', 'v', 'k_window', 'v_window')  # what a cache holds for every token
PAIRS = ('k_cmp', 'v_cmp')  # and for every compressed block


class LayerCache:
    """What one attention layer keeps of the past.

    k `[B, capacity, H, D]`, v `[B, capacity, H, DV]`: keys after rotary, and values. With `compress=(l, d)` also k_cmp
    and v_cmp `[B, C + 1, H, D or DV]` (the last slot takes the candidate of an incomplete block), and rings raw_k and
    raw_v of the last l - 1 + max_rollback keys before rotary (`has_raw_k`) and values (`has_raw_v`) that the next
    compressed block needs; without a ring k or v themselves serve. With `has_window` the window branch has keys and
    values of its own, k_window and v_window. Without `has_v_cmp` there are no compressed values, v_cmp.

    Args:
        batch_size, max_seq_len: rows and tokens per row. kv_heads, head_dim, value_dim: H, D, DV.
        max_rollback: tokens that `crop` can take back.
        compress: (l, d), or None for a layer without compressed keys.
        grows: past max_seq_len the tensors are made anew, twice as long, instead of an error.

    Attributes:
        lengths: int32 `[B]` on the device. max_length: host int, no row is longer. capacity: tokens per row.
        page_size, page_size_cmp, block_table, block_table_cmp: of a `PagedLayerCache`; None in this one.
    """

    page_size: int | None = None
    page_size_cmp: int | None = None
    block_table: Tensor | None = None
    block_table_cmp: Tensor | None = None

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
        has_v_cmp: bool = True,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str | None = None,
        grows: bool = False,
    ) -> None:
        check_positive(batch_size=batch_size, max_seq_len=max_seq_len)
        check_positive(kv_heads=kv_heads, head_dim=head_dim, value_dim=value_dim)
        check_not_negative(max_rollback=max_rollback)
        check_flags(has_raw_k=has_raw_k, has_raw_v=has_raw_v, has_window=has_window, has_v_cmp=has_v_cmp, grows=grows)
        check_float_dtype(dtype=dtype)
        check_compress(compress)
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
            'has_v_cmp': has_v_cmp,
        }

        def zeros(slots: int, dim: int) -> Tensor:
            return _zeros((batch_size, slots, kv_heads, dim), dtype, device)

        def stored(name: str, slots: int, dim: int) -> Tensor:
            return self._make(name, (batch_size, slots, kv_heads, dim), dtype, device)

        self.k, self.v = stored('k', max_seq_len, head_dim), stored('v', max_seq_len, value_dim)
        self.k_window = self.v_window = self.k_cmp = self.v_cmp = self.raw_k = self.raw_v = None
        if has_window:
            self.k_window = stored('k_window', max_seq_len, head_dim)
            self.v_window = stored('v_window', max_seq_len, value_dim)
        if compress is not None:
            block_size, stride = compress
            slots = num_compressed_blocks(max_seq_len, block_size, stride) + 1
            self.k_cmp = stored('k_cmp', slots, head_dim)
            self.v_cmp = stored('v_cmp', slots, value_dim) if has_v_cmp else None
            ring = max(1, block_size - 1 + max_rollback)
            self.raw_k = zeros(ring, head_dim) if has_raw_k else None
            self.raw_v = zeros(ring, value_dim) if has_raw_v else None
        # The longest that each row has been since it was empty, and the host's bound on all: what lies a ring's size
        # before it is lost, even if the row has been cropped since.
        self.lengths, self._peaks = (_zeros((batch_size,), torch.int32, device) for _ in range(2))
        self.max_length = self._peak = 0
        # Of the kernels that decode, by name and shape: results that one launch leaves for the next.
        self.workspace: dict[tuple[Any, ...], Tensor] = {}
        # And the launches of steps, by what they depend on, to be made again.
        self.launches: dict[tuple[Any, ...], Any] = {}
        # Networks φ, and numbers and dtypes of blocks that they were tried on before any was laid out.
        self.networks_tried: set[tuple[Any, ...]] = set()

    def __getstate__(self) -> dict[str, Any]:
        # Launches have addresses, and a copy has tensors of its own; networks are known by identity.
        return self.__dict__ | {'workspace': {}, 'launches': {}, 'networks_tried': set()}

    @property
    def capacity(self) -> int:
        return self.k.shape[1]

    @property
    def dtype(self) -> torch.dtype:
        return self.k.dtype

    @property
    def device(self) -> torch.device:
        return self.k.device

    def has_room(self, num_tokens: int) -> bool:
        """Whether `num_tokens` more fit as it is."""
        return self.max_length + num_tokens <= self.capacity

    def reserve(self, num_tokens: int) -> None:
        """Make sure that `num_tokens` more fit; raises ValueError, with nothing written, where they may not."""
        if self.has_room(num_tokens):
            return
        needed = self.max_length + num_tokens
        if not self.grows:
            raise ValueError(
                f'the cache holds up to {self.max_length} tokens a row and gets {num_tokens} more, but its capacity is '
                f'{self.capacity}: pass a larger max_seq_len to init_cache'
            )
        capacity = self.capacity
        while capacity < needed:
            capacity *= 2
        self._grow(capacity)

    def advance(self, num_tokens: int) -> None:
        """Move the host's bounds by `num_tokens`, as `append` does.

        For users of CUDA graphs: a replay that appends up to so many tokens moves `lengths` alone, so call `reserve`
        before it and this after it.
        """
        self.max_length += num_tokens
        self._peak = max(self._peak, self.max_length)

    def remember(self, key: tuple[Any, ...], launches: Any) -> None:
        """Keep the launches of a step; where too many are kept, forget the others."""
        if len(self.launches) >= MAX_LAUNCHES:
            self.launches.clear()
        self.launches[key] = launches

    def read(self, num_tokens: int) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None]:
        """k, v, k_window, v_window `[B, num_tokens, H, D or DV]`: the first tokens of every row, and anything behind
        the end of shorter rows. Views where the cache has them in one piece.
        """
        k_window, v_window = (
            None if t is None else self._read(name, num_tokens)
            for name, t in (('k_window', self.k_window), ('v_window', self.v_window))
        )
        return self._read('k', num_tokens), self._read('v', num_tokens), k_window, v_window

    def read_compressed(self, num_blocks: int) -> tuple[Tensor, Any]:
        """k_cmp, v_cmp (or None) `[B, num_blocks, H, D or DV]`: the first compressed blocks of rows, as in `read`."""
        assert self.compress is not None
        v_cmp = None if self.v_cmp is None else self._read('v_cmp', num_blocks)
        return self._read('k_cmp', num_blocks), v_cmp

    def storage(self) -> Storage:
        """The tensors as the kernels that decode take them."""
        assert self.k_cmp is not None
        return Storage(
            *(self.k, self.v, self.k_window, self.v_window, self.k_cmp, self.v_cmp, self.raw_k, self.raw_v),
            *(self.lengths, self._peaks, self.block_table, self.block_table_cmp, self.capacity),
        )

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
            torch.cat((self._recent(name, history), new.to(self.dtype)), 1)[row, token]
            for name, new in (('k', k), ('v', v))
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
        compressed: tuple[Tensor, Tensor, Tensor | None] | None = None,
    ) -> None:
        """Write new tokens behind every row and advance its length.

        k, k_window, raw_k: `[B, T, H, D]`; v, v_window, raw_v: `[B, T, H, DV]`. counts: int32 `[B]`, how many of the T
        are real (default all); the rest must stand behind them. compressed: the indices of `block_candidates` with the
        compressed keys `[B, K, H, D]` and values `[B, K, H, DV]` (None where the cache has none) of those blocks.
        """
        num_tokens = k.shape[1]
        assert self.max_length + num_tokens <= self.capacity, 'reserve first'
        old = self.lengths.long()
        new = old + (num_tokens if counts is None else counts)
        position = self.positions(num_tokens)
        for name, tokens in zip(TOKENS, (k, v, k_window, v_window), strict=True):
            if tokens is not None and getattr(self, name) is not None:
                self._write(name, position, tokens.to(self.dtype), new)
        for ring, tokens in ((self.raw_k, raw_k), (self.raw_v, raw_v)):
            if ring is not None and tokens is not None:
                _write_ring(ring, tokens.to(self.dtype), old, new)
        if compressed is not None and self.compress is not None:
            block, *pair = compressed
            num_blocks = num_compressed_blocks(new, *self.compress)
            for name, summaries in zip(PAIRS, pair, strict=True):
                if summaries is None:
                    continue
                self._write(name, block, summaries.to(self.dtype), num_blocks)
        self.lengths.copy_(new)
        self._peaks.copy_(torch.maximum(self._peaks, self.lengths))
        self.advance(num_tokens)

    def reset(self) -> None:
        """Forget everything; the tensors stay."""
        self.lengths.zero_()
        self._peaks.zero_()
        self.max_length = self._peak = 0

    def reorder(self, index: Tensor) -> None:
        """Row b becomes what row index[b] is, as beam search needs it. index: int32 or int64 `[B]`."""
        check_tensors(index=index)
        if index.shape != (self.batch_size,) or index.dtype not in (torch.int32, torch.int64):
            raise ValueError(
                f'index has shape {tuple(index.shape)} and dtype {index.dtype}, but must be integers '
                f'[{self.batch_size}]'
            )
        if index.is_cpu and ((index < 0) | (index >= self.batch_size)).any():
            raise ValueError(f'index is {index.tolist()}, but must be rows from 0 to {self.batch_size - 1}')
        for tensor in (self.lengths, self._peaks, self.raw_k, self.raw_v):
            if tensor is not None:
                tensor.copy_(tensor.index_select(0, index))
        lengths = self.lengths.long()
        self._reorder(TOKENS, index, self.max_length, lengths)
        if self.compress is not None:
            longest = num_compressed_blocks(self.max_length, *self.compress)
            self._reorder(PAIRS, index, longest, num_compressed_blocks(lengths, *self.compress))

    def crop(self, length: int | Tensor, *, max_length: int | None = None) -> None:
        """Keep the first `length` tokens of every row that is longer, as speculative decoding needs it.

        length: an int, or an integer tensor `[B]` of one length per row. max_length: for a tensor alone, the host's
        bound on the longest row afterwards (default: the longest on CPUs; on a GPU it stays: give it there). Except to
        0, at most `max_rollback` tokens behind the longest that a row has been can be taken back: ValueError beyond,
        and for a max_length that a row exceeds (the content of a tensor is checked on CPUs only, since reading it on a
        GPU waits for the device).
        """
        if isinstance(length, Tensor):
            if max_length is not None:
                check_not_negative(max_length=max_length)
            if length.shape != (self.batch_size,) or length.dtype not in (torch.int32, torch.int64):
                raise ValueError(
                    f'length has shape {tuple(length.shape)} and dtype {length.dtype}, but must be an int or integers '
                    f'[{self.batch_size}]'
                )
            if self.lengths.is_cpu:
                for row in zip(length.tolist(), self.lengths.tolist(), self._peaks.tolist(), strict=True):
                    self._check_rollback(*row)
            lengths = torch.minimum(self.lengths, length.to(self.lengths))
            longest = int(lengths.max()) if lengths.is_cpu else None
            if max_length is None:
                max_length = self.max_length if longest is None else longest
            elif longest is not None and max_length < longest:
                raise ValueError(f'max_length is {max_length}, but must be at least {longest}, the longest row')
            self.lengths.copy_(lengths)
            bound = max_length
        else:
            if max_length is not None:
                raise ValueError(f'max_length is {max_length}, but must be left out where length is an int')
            check_not_negative(length=length)
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
        names = (*TOKENS, *PAIRS, 'raw_k', 'raw_v')
        return [tensor for tensor in (getattr(self, name) for name in names) if tensor is not None]

    def _make(self, name: str, shape: Sequence[int], dtype: torch.dtype, device: Any) -> Tensor:
        """The tensor `name`, of shape `[B, slots, H, D or DV]` in one piece."""
        return _zeros(shape, dtype, device)

    def _read(self, name: str, count: int) -> Tensor:
        """The first `count` entries of every row, `[B, count, H, D or DV]`."""
        return getattr(self, name)[:, :count]

    def _read_at(self, name: str, index: Tensor) -> Tensor:
        """The entries at index `[B, n]` of each row; those out of range give anything."""
        tensor = getattr(self, name)
        return tensor[_rows(tensor), index.clamp(0, tensor.shape[1] - 1)]

    def _write(self, name: str, index: Tensor, entries: Tensor, ends: Tensor) -> None:
        """Write entries `[B, n, H, D or DV]` at index `[B, n]` of each row; what is not before ends `[B]` may be."""
        tensor = getattr(self, name)
        tensor[_rows(tensor), index] = entries

    def _reorder(self, names: Sequence[str], index: Tensor, count: int, ends: Tensor) -> None:
        """Row b gets the first ends[b] entries of row index[b], none more than `count`."""
        where = torch.arange(count, device=self.device).expand(self.batch_size, -1)
        for name in names:
            if getattr(self, name) is not None:
                self._write(name, where, self._read(name, count).index_select(0, index), ends)

    def _recent(self, name: str, position: Tensor) -> Tensor:
        """Raw 'k' or 'v' at recent positions `[B, n]`, from the ring if there is one; negative ones give anything."""
        ring = getattr(self, f'raw_{name}')
        return self._read_at(name, position) if ring is None else ring[_rows(ring), position % ring.shape[1]]

    def _grow(self, capacity: int) -> None:
        self.workspace.clear()  # it is as large as the capacity
        self.launches.clear()
        for name in TOKENS:
            setattr(self, name, _longer(getattr(self, name), capacity))
        if self.compress is not None:
            slots = num_compressed_blocks(capacity, *self.compress) + 1
            self.k_cmp, self.v_cmp = _longer(self.k_cmp, slots), _longer(self.v_cmp, slots)


def check_compress(compress: Any) -> None:
    """A pair (l, d), 1 <= d <= l, or None."""
    if compress is None:
        return
    if not isinstance(compress, tuple | list) or len(compress) != 2:
        raise ValueError(f'compress is {shown(compress)}, but must be a pair (block size, stride) or None')
    check_block_sizes(*compress)


def check_layer_cache(cache: Any) -> None:
    """Refuse what is not the cache of one layer, such as that of a model."""
    if not isinstance(cache, LayerCache):
        kind = type(cache).__name__
        raise ValueError(f'cache is a {kind}, but must be a LayerCache, as init_cache of the layer gives')


class ModelCache(Sequence[LayerCache]):
    """The caches of a model's layers, advanced together by the model's forward.

    Indexing gives the `LayerCache` of a layer. The methods and properties are those of a `LayerCache`, for all layers.
    """

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


def check_model_cache(cache: Any) -> None:
    """Refuse what is not the cache of a model, such as that of one layer."""
    if not isinstance(cache, ModelCache):
        kind = type(cache).__name__
        raise ValueError(f'cache is a {kind}, but must be a ModelCache, as init_cache of the model gives')


def _zeros(shape: Sequence[int], dtype: torch.dtype, device: Any) -> Tensor:
    with torch.inference_mode(False):  # tensors made under it could not be written outside
        return torch.zeros(*shape, dtype=dtype, device=device)


def _rows(tensor: Tensor) -> Tensor:
    """int64 `[B, 1]`: the index of every row."""
    return torch.arange(tensor.shape[0], device=tensor.device)[:, None]


def _write_ring(ring: Tensor, tokens: Tensor, old: Tensor, new: Tensor) -> None:
    """Write positions [old, new), p into slot p mod R; a slot takes the latest that falls on it, or stays."""
    if tokens.shape[1] == 0:
        return
    size = ring.shape[1]
    last = (new - 1)[:, None]
    latest = last - (last - torch.arange(size, device=ring.device)) % size
    source = latest - old[:, None]
    written = tokens[_rows(ring), source.clamp(0, tokens.shape[1] - 1)]
    ring.copy_(torch.where((source >= 0)[..., None, None], written, ring))


def _longer(tensor: Tensor | None, tokens: int) -> Tensor | None:
    if tensor is None:
        return None
    longer = _zeros((tensor.shape[0], tokens, *tensor.shape[2:]), tensor.dtype, tensor.device)
    longer[:, : tensor.shape[1]] = tensor
    return longer
