"""A layer's cache whose keys and values lie in pages of pools, so that a serving engine can own the memory.

Token p of row b is entry `p % page_size` of page `block_table[b, p // page_size]`. The methods are those of
`LayerCache`.
"""

from __future__ import annotations

from collections.abc import Mapping
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn

from native_sparse_attention.core.checks import FLOAT_DTYPES, check_not_negative, check_positive, check_tensors, shown
from native_sparse_attention.core.geometry import num_compressed_blocks
from native_sparse_attention.core.projection import floating_weight, projection_dtype
from native_sparse_attention.inference.cache import MAX_ROLLBACK, PAIRS, TOKENS, LayerCache, check_compress


class PagedLayerCache(LayerCache):
    """A `LayerCache` over pools of pages and two block tables, which it makes or the caller owns.

    Pools: k `[num_pages, page_size, H, D]`, v `[num_pages, page_size, H, DV]`, with has_window k_window and v_window of
    the same shapes, all addressed by block_table; with compress=(l, d) k_cmp `[num_pages_cmp, page_size // d, H, D]`
    and v_cmp `[num_pages_cmp, page_size // d, H, DV]`, addressed by block_table_cmp. N tokens complete at most N / d
    blocks, so a row has as many compressed pages as pages. Lengths and rings are per row, as in a `LayerCache`.

    The owner may change the content of the tables in place between calls: a row needs the pages of its tokens before
    they are appended. Other entries may be anything, such as -1. Only real tokens and complete blocks are written, and
    a write to a page that does not exist is dropped; only `validate_tables` reads tables back and reports such pages.
    No two rows may share a page. Tables are never written here, and may serve all layers of a model.

    Args:
        batch_size: number of rows.
        max_seq_len: tokens that a row may have.
        page_size: tokens of a page, a multiple of l' and of d.
        selection_block_size: l', by which kernels read pages; 1 for a layer without selection.
        kv_heads: H, number of KV heads.
        head_dim: D, size of a key head.
        value_dim: DV, size of a value head.
        num_pages: pages of each pool that is made; default enough to fill every row.
        pools: the tensors by name, of any strides; by default they are made.
        block_table: int32 `[B, n]`, n at least ceil(max_seq_len / page_size). By default row b has the pages b * n and
            following.
        block_table_cmp: the same for compressed pages; default block_table, where one id stands for a page in either
            pool.
        max_rollback: as in `LayerCache`; with None the rings hold the capacity of every row.
        compress: (l, d), or None for a layer without compressed keys.
        has_raw_k: keep a ring of keys without rotary embedding, from which blocks are compressed.
        has_raw_v: keep a ring of values, where those of the compressed branch differ from v.
        has_window: keep keys and values of its own for the window branch.
        has_v_cmp: keep compressed values.
        dtype: dtype of pools that are made; by default that of the pools.
        device: device of the pools, lengths and rings; by default that of the pools.

    Raises:
        ValueError: sizes, pools or tables do not fit; names argument, value and rule.
    """

    def __init__(
        self,
        batch_size: int,
        max_seq_len: int,
        *,
        page_size: int,
        selection_block_size: int,
        kv_heads: int,
        head_dim: int,
        value_dim: int,
        num_pages: int | None = None,
        pools: Mapping[str, Tensor] | None = None,
        block_table: Tensor | None = None,
        block_table_cmp: Tensor | None = None,
        max_rollback: int | None = MAX_ROLLBACK,
        compress: tuple[int, int] | None = None,
        has_raw_k: bool = False,
        has_raw_v: bool = False,
        has_window: bool = False,
        has_v_cmp: bool = True,
        dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
    ) -> None:
        check_positive(page_size=page_size, num_pages=1 if num_pages is None else num_pages)
        check_positive(selection_block_size=selection_block_size)
        check_compress(compress)
        stride = 1 if compress is None else compress[1]
        for name, size in (('selection_block_size', selection_block_size), ('the compression stride', stride)):
            if page_size % size != 0:
                raise ValueError(f'page_size is {page_size}, but must be a multiple of {name}, {size}')
        self.page_size, self.page_size_cmp = page_size, None if compress is None else page_size // stride
        self._capacity, self._pools, self._num_pages = max_seq_len, pools, num_pages
        self._selection_block_size = selection_block_size
        given = {'pools': pools, 'block_table': block_table, 'block_table_cmp': block_table_cmp}
        self._given = [name for name, value in given.items() if value is not None]
        if pools is not None:
            if num_pages is not None:
                raise ValueError(f'num_pages is {num_pages}, but must be left out where pools are given')
            if not isinstance(pools, Mapping):
                raise ValueError(f'pools is {shown(pools)}, but must be a mapping of names to tensors')
            names = [*TOKENS[: 4 if has_window else 2], *(PAIRS[: 2 if has_v_cmp else 1] if compress else ())]
            if set(pools) != set(names):
                raise ValueError(f'pools has {", ".join(map(str, pools))}, but must have {", ".join(names)}')
            check_tensors(**pools)
            dtype, device = dtype or pools['k'].dtype, device or pools['k'].device
        super().__init__(
            batch_size,
            max_seq_len,
            kv_heads=kv_heads,
            head_dim=head_dim,
            value_dim=value_dim,
            max_rollback=max_rollback,
            compress=compress,
            has_raw_k=has_raw_k,
            has_raw_v=has_raw_v,
            has_window=has_window,
            has_v_cmp=has_v_cmp,
            dtype=dtype or torch.float32,
            device=device,
        )
        if self.lengths.device != self.device:
            raise ValueError(f'device is {self.lengths.device}, but the pools are on {self.device}')
        self.block_table = self._make_table('block_table', block_table, self.k.shape[0])
        if self.k_cmp is not None:
            table = block_table if block_table_cmp is None else block_table_cmp
            self.block_table_cmp = self._make_table('block_table_cmp', table, self.k_cmp.shape[0])

    @property
    def capacity(self) -> int:
        return self._capacity

    def validate_tables(self, num_tokens: int = 0) -> None:
        """Raise ValueError where a row lacks a page for the tokens it has and `num_tokens` more; waits for the device.

        This covers the compressed pairs too: a row needs the page of every block that these tokens complete.
        """
        check_not_negative(num_tokens=num_tokens)
        tokens = self.lengths.long() + num_tokens
        self._validate('block_table', tokens, 'k')
        if self.compress is not None:
            self._validate('block_table_cmp', num_compressed_blocks(tokens, *self.compress), 'k_cmp')

    def reorder(self, index: Tensor) -> None:
        """Replace row b by row index[b] in place, as a step of beam search needs it. index: int32 or int64 `[B]`.

        Contents are copied from page to page, and the tables stay: rows that shared pages would both append to the
        last one, and after `crop` to earlier ones. So row b needs pages for as many tokens as row index[b] has.
        """
        super().reorder(index)

    def select(self, index: Tensor) -> LayerCache:
        """As `LayerCache.select`; the new cache has pools and tables of its own.

        Raises ValueError where pools or tables are the caller's, who alone can give pages to new rows.
        """
        if self._given:
            raise ValueError(
                f'{" and ".join(self._given)} were given to this PagedLayerCache, but select and repeat_interleave '
                f'need pools and tables of its own: make a cache with all rows and use reorder'
            )
        return super().select(index)

    def _empty_like(self, batch_size: int) -> LayerCache:
        assert self.page_size is not None
        return PagedLayerCache(
            batch_size,
            self.capacity,
            page_size=self.page_size,
            selection_block_size=self._selection_block_size,
            max_rollback=self.max_rollback,
            dtype=self.dtype,
            device=self.device,
            **self.layout,  # type: ignore[arg-type]
        )

    @property
    def _pages_per_row(self) -> int:
        return -(-self.capacity // self._page_size('k'))

    def _page_size(self, name: str) -> int:
        size = self.page_size_cmp if name in PAIRS else self.page_size
        assert size is not None
        return size

    def _make(self, name: str, shape: tuple[int, ...], dtype: torch.dtype, device: Any) -> Tensor:
        batch_size, _, *entry = shape
        page = (self._page_size(name), *entry)
        if self._pools is None:
            num_pages = batch_size * self._pages_per_row if self._num_pages is None else self._num_pages
            return super()._make(name, (num_pages, *page), dtype, device)
        pool, first = self._pools[name], self._pools['k_cmp' if name in PAIRS else 'k']
        if first.shape[0] < 1 or pool.shape != (first.shape[0], *page):
            rule = ', '.join(map(str, ('num_pages', *page)))
            raise ValueError(f'{name} has shape {tuple(pool.shape)}, but must be [{rule}]')
        if pool.dtype != dtype or pool.device != first.device:
            raise ValueError(f'{name} is {pool.dtype} on {pool.device}, but must be {dtype} on {first.device}')
        return pool

    def _make_table(self, name: str, table: Tensor | None, num_pages: int) -> Tensor:
        rows, pages = self.batch_size, self._pages_per_row
        if table is None:
            if num_pages < rows * pages:
                raise ValueError(
                    f'num_pages is {num_pages}, but must be at least {rows * pages} for {rows} rows of {pages} pages'
                )
            with torch.inference_mode(False):
                return torch.arange(rows * pages, dtype=torch.int32, device=self.device).view(rows, pages)
        check_tensors(**{name: table})
        if table.dtype != torch.int32 or table.dim() != 2 or table.shape[0] != rows or table.shape[1] < pages:
            raise ValueError(
                f'{name} has shape {tuple(table.shape)} and dtype {table.dtype}, but must be int32 [{rows}, n], n at '
                f'least {pages}'
            )
        if table.device != self.device:
            raise ValueError(f'{name} is on {table.device}, but must be on {self.device}')
        return table

    def _validate(self, name: str, counts: Tensor, of: str) -> None:
        """Every page of the first counts[b] entries of row b must exist."""
        table, last = self._table(of), getattr(self, of).shape[0] - 1
        for row, (pages, count) in enumerate(zip(table.tolist(), counts.tolist(), strict=True)):
            needed = -(-count // self._page_size(of))
            if needed > len(pages):
                raise ValueError(f'{name} has {len(pages)} pages a row, but must have {needed} for row {row}')
            for column, page in enumerate(pages[:needed]):
                if not 0 <= page <= last:
                    raise ValueError(f'{name}[{row}, {column}] is {page}, but must be a page from 0 to {last}')

    def _table(self, name: str) -> Tensor:
        table = self.block_table_cmp if name in PAIRS else self.block_table
        assert table is not None
        return table

    def _locate(self, name: str, index: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Pages and their entries where index `[B, n]` of each row lies, and whether such a page exists; all `[B, n]`.

        A page that does not exist is replaced by one that does.
        """
        table, size, num_pages = self._table(name), self._page_size(name), getattr(self, name).shape[0]
        column = index // size
        page = table.gather(1, column.clamp(0, table.shape[1] - 1)).long()
        exists = (page >= 0) & (page < num_pages)
        return page.clamp(0, num_pages - 1), index % size, exists

    def _read(self, name: str, count: int) -> Any:
        pool = getattr(self, name)
        if pool is None:
            return None
        pages = self._table(name)[:, : -(-count // self._page_size(name))].clamp(0, pool.shape[0] - 1)
        return pool[pages.long()].flatten(1, 2)[:, :count]

    def _read_at(self, name: str, index: Tensor) -> Tensor:
        page, entry, _ = self._locate(name, index)
        return getattr(self, name)[page, entry]

    def _write(self, name: str, index: Tensor, entries: Tensor, ends: Tensor) -> None:
        page, entry, exists = self._locate(name, index)
        kept = exists & (index < ends[:, None])
        _write_kept(getattr(self, name), *(t.flatten(0, 1) for t in (page, entry, kept, entries)))


def _write_kept(pool: Tensor, page: Tensor, entry: Tensor, kept: Tensor, entries: Tensor) -> None:
    """Write entries `[N, H, D]` at entry `[N]` of page `[N]` where kept `[N]`.

    The host does not know which are kept, so all are written: one that is dropped repeats the first that is kept, or
    where none is, writes what it finds at a place that nothing else writes.
    """
    if kept.numel() == 0:
        return
    first = kept.int().argmax(0, keepdim=True)
    spare_page, spare_entry = page[first], entry[first]
    spare = torch.where(kept.any(), entries[first], pool[spare_page, spare_entry])
    where = torch.where(kept, page, spare_page), torch.where(kept, entry, spare_entry)
    pool[where] = torch.where(kept[:, None, None], entries, spare)


def make_cache(
    batch_size: int,
    max_seq_len: int,
    *,
    page_size: int | None = None,
    num_pages: int | None = None,
    selection_block_size: int = 1,
    grows: bool = False,
    **settings: Any,
) -> LayerCache:
    """A `PagedLayerCache` with pools and tables of its own where page_size is given, else a `LayerCache`."""
    if page_size is not None:
        paging = {'page_size': page_size, 'num_pages': num_pages, 'selection_block_size': selection_block_size}
        return PagedLayerCache(batch_size, max_seq_len, **paging, **settings)
    if num_pages is not None:
        raise ValueError(f'num_pages is {num_pages}, but must be left out without page_size')
    return LayerCache(batch_size, max_seq_len, grows=grows, **settings)


def cache_kind(
    layer: nn.Module, to_qkv: nn.Module, dtype: torch.dtype | None, device: torch.device | str | None
) -> tuple[torch.dtype, torch.device | str]:
    """dtype and device of the layer's cache. By default those of to_qkv in a call, under autocast its dtype; where
    to_qkv is quantised, the dtype of the first weight of the layer that is not.
    """
    run_dtype, run_device = (getattr(layer, name, None) for name in ('run_dtype', 'run_device'))
    device = run_device if device is None else device
    if dtype is None:
        # The frequencies of rotary stay float32 where the layer is cast.
        own = (p for name, p in layer.named_parameters() if p.dtype in FLOAT_DTYPES and not name.startswith('rotary.'))
        weight = floating_weight(to_qkv)
        weight = next(own, None) if weight is None else weight
        if weight is None:
            raise ValueError('dtype is None, but must be given where all weights of the layer are quantised')
        kind: dict[str, Any] = {'dtype': run_dtype or weight.dtype, 'device': run_device or weight.device}
        dtype = projection_dtype(torch.empty(0, **kind))
    if device is None:
        tensor = next(chain(to_qkv.parameters(), to_qkv.buffers(), layer.parameters()), None)
        if tensor is None:
            raise ValueError('device is None, but must be given where the layer has no parameters')
        device = _execution_device(to_qkv) if tensor.is_meta else tensor.device
    return dtype, device


def _execution_device(module: nn.Module) -> torch.device | str:
    """Return the device on which a module runs whose weights are on the meta device between its calls."""
    hook: Any = getattr(module, '_hf_hook', None)  # of accelerate, which loads offloaded weights for each call
    devices = (getattr(each, 'execution_device', None) for each in (hook, *getattr(hook, 'hooks', ())))
    return next((device for device in devices if device is not None), torch.device('meta'))
