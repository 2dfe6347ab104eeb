"""Gradients of queries by block: each KV block stores its share of the gradients of the queries that selected it.

The gradient of a logit needs delta, the sum of p * dp over the keys of all blocks of a query. So the CSR index is
traversed twice: for delta, which is exact then, and for the gradients. The gradients of k and v come from another
kernel (dkv/kernels.py): beside its sums, the registers do not hold a partial dq.
"""

from __future__ import annotations

from itertools import product

import torch
from torch import Tensor

from native_sparse_attention.ops._triton.inverse_index import group_pairs, num_block_slots
from native_sparse_attention.ops._triton.launch import exceeds_int32, head_block, launch, row_block
from native_sparse_attention.ops.selected_attention.triton import settings
from native_sparse_attention.ops.selected_attention.triton.arguments import (
    Arguments,
    Sizes,
    Tile,
    sizes_of,
    stride_of,
    strides_of,
)
from native_sparse_attention.ops.selected_attention.triton.by_block.dq_kernels import (
    Inputs,
    block_dq_kernel,
    sum_kernel,
)
from native_sparse_attention.ops.selected_attention.triton.by_block.forward import CHUNK_ROWS, MERGE_ROWS, WORKSPACE
from native_sparse_attention.ops.selected_attention.triton.by_block.partials import (
    PartialResults,
    allocate_inverse_units,
    allocate_partials,
    bytes_per_row,
)
from native_sparse_attention.ops.selected_attention.triton.index.block_to_query import (
    BlockToQuery,
    count_programs,
    make_block_to_query,
    split_evenly,
)


class BlockQueryGradients:
    """Compute dq, the gradients of the factors, and delta, which dk and dv need (`QueryGradients` of dkv/launch.py).

    fused: the kernel for dk and dv stores the partial results for dq as well, and the pass for delta sums what the
    gradients of the factors take.
    """

    def __init__(
        self,
        arguments: Arguments,
        lse: Tensor,
        dout: Tensor,
        dlse: Tensor | None,
        gate: Tensor | None,
        needs_dfactors: bool,
        grad_dtype: torch.dtype,
        fused: bool = False,
    ) -> None:
        """Allocate dq, delta and inverse units `[B, HQ, T]` and dfactors (float32 `[B * H, T, R, n]`, or None).

        They are filled while the CSR index is traversed.
        """
        self.arguments, (q, k) = arguments, arguments[:2]
        self.lse, self.dout, self.dlse, self.gate = lse, dout, dlse, gate
        self.sizes = sizes_of(arguments)
        group, repeats, num_selected = self.sizes[:3]
        rows_per_token = repeats * num_selected * group
        # Delta and inverse units of one batch row count towards the workspace.
        workspace = max(WORKSPACE - 2 * lse[:1].numel() * lse.element_size(), WORKSPACE // 2)
        bytes_of_row = bytes_per_row(q, q.shape[3]) + (8 if fused else 4)
        self.max_tokens = max(1, workspace // max(1, rows_per_token * bytes_of_row))
        self.max_delta_tokens = max(1, workspace // max(1, rows_per_token * bytes_per_row(q, 0)))
        # The partial results of several pairs need not exist together unless fused, but a range of tokens is one of a
        # single pair.
        most = max(1, self.max_tokens // max(1, q.shape[1])) if fused else q.shape[0] * k.shape[2]
        self.max_pairs = most if q.shape[1] <= self.max_tokens else 1
        self.dq = q.new_empty(q.shape, dtype=grad_dtype)
        self.delta = torch.empty_like(lse)
        self.inverse_units = allocate_inverse_units(lse, q.dtype)
        shape = (q.shape[0] * k.shape[2], q.shape[1], repeats, num_selected)
        self.dfactors = q.new_empty(shape, dtype=torch.float32) if needs_dfactors else None
        self.fused = fused
        self.dq_partials: PartialResults | None = None

    @property
    def stored(self) -> tuple[None, Tensor | None, Tensor | None, Tensor | None]:
        # With few heads, partial results are smaller than gradients of logits.
        if self.dq_partials is None:
            return None, None, None, None
        return None, self.dq_partials.data, self.dq_partials.unit, self.inverse_units

    def prepare(self, csr: BlockToQuery, pairs: range, tokens: range) -> None:
        """Compute delta and, unless fused, the gradients of these tokens, for as many pairs at a time as the workspace
        holds.

        The pass for delta stores single numbers, so it takes more pairs at a time.
        """
        if self.fused:
            self.dq_partials = self._differentiate(csr, pairs, tokens, computes_dq=False)
            return
        for computes_dq, most in ((False, self.max_delta_tokens), (True, self.max_tokens)):
            for some in split_evenly(len(pairs), max(1, most // max(1, len(tokens)))):
                self._differentiate(csr.of(some), pairs[some.start : some.stop], tokens, computes_dq)

    def _differentiate(self, csr: BlockToQuery, pairs: range, tokens: range, computes_dq: bool) -> PartialResults:
        q, dfactors = self.arguments.q, self.dfactors if computes_dq or self.fused else None
        rows, has_dfactors = len(pairs) * csr.num_entries * self.sizes.group, dfactors is not None
        size = q.shape[3] if computes_dq or self.fused else 0
        partials = allocate_partials(q, rows, size, has_dfactors, has_dfactors and self.fused)
        inputs = (self.lse, self.dout, self.delta, self.inverse_units)
        compute_partials(self.arguments, self.sizes, inputs, partials, csr, pairs, computes_dq)
        self._add_partials(partials, csr, pairs, tokens, computes_dq)
        if dfactors is not None:
            _add_heads(partials.second, self.sizes.group, dfactors, pairs, tokens)
        return partials

    def finish(self, csr: BlockToQuery, pairs: range, tokens: range) -> None:
        """Add up the partial dq that the kernel for dk and dv has stored, if fused."""
        if self.dq_partials is not None:
            self._add_partials(self.dq_partials, csr, pairs, tokens, computes_dq=True)
            self.dq_partials = None  # frees the partial results before the next ones are allocated

    def _add_partials(
        self, partials: PartialResults, csr: BlockToQuery, pairs: range, tokens: range, computes_dq: bool
    ) -> None:
        """Add up the partial results of the pass for delta, or of those for dq."""
        dlse, sizes, layout = self.dlse, self.sizes, self.arguments.layout
        # With the gate, dq receives it here; or it is in the gradients of the logits, whose units it changes.
        gate = self.gate if computes_dq != self.fused else None
        launch(
            sum_kernel,
            (len(pairs) * -(-len(tokens) * sizes.repeats * sizes.group // MERGE_ROWS),),
            *(partials, self.delta, self.inverse_units, self.lse, dlse, gate, self.dq),
            *(stride_of(dlse), stride_of(gate), self.dq.stride(), layout, csr, len(tokens), self.arguments.scale),
            COMPUTE_DQ=computes_dq,
            sizes=sizes,
            UNROLLED=min(sizes.num_selected, 4),
            BLOCK_M=MERGE_ROWS,
            BLOCK_D=head_block(sizes.head_dim),
            num_warps=4,
            device=self.dq.device,
        )


def compute_partials(
    arguments: Arguments,
    sizes: Sizes,
    inputs: tuple[Tensor, Tensor, Tensor, Tensor | None],
    partials: PartialResults,
    csr: BlockToQuery,
    pairs: range,
    computes_dq: bool,
) -> None:
    """Launch `block_dq_kernel`. inputs: lse, dout, delta and inverse units."""
    q, k, v, _, block_scale, layout, _, _, scale, softcap = arguments
    lse, dout, *_ = inputs
    stores_dq = computes_dq and partials.data is not None
    tables = (settings.BLOCK_DQ, settings.BLOCK_DQ_SHORT) if stores_dq else (settings.BLOCK, settings.BLOCK_SHORT)
    block_m, _, num_warps, num_stages = settings.settings_of_blocks(*tables, sizes.block_size, q, v)
    if not stores_dq:
        num_stages = min(num_stages, 2)  # a stage holds q and dout, twice as much as in the forward pass
    chunk = max(1, CHUNK_ROWS // sizes.group)
    num_programs = count_programs(csr.num_entries, csr.num_slots, chunk)
    head_blocks = (head_block(sizes.head_dim), head_block(sizes.value_dim))
    launch(
        block_dq_kernel,
        (len(pairs) * num_programs,),
        Inputs(q, k, v, block_scale, *inputs),
        partials,
        strides_of(q=q, k=k, v=v, factors=block_scale, dout=dout),
        *(layout, csr._replace(num_programs=num_programs), scale, softcap),
        COMPUTE_DQ=computes_dq,
        sizes=sizes,
        tile=Tile(
            block_m, row_block(sizes.block_size), *head_blocks, exceeds_int32(q, dout, lse, block_scale), chunk=chunk
        ),
        num_warps=num_warps,
        num_stages=num_stages,
        device=q.device,
    )


def differentiate_factors(arguments: Arguments, lse: Tensor, delta: Tensor, dout: Tensor) -> Tensor:
    """Return the gradients of the factors alone, float32 `[B, T, HI, n]`; 0 where an index names no block or repeats
    one. lse, delta: float32 `[B, HQ, T]`, contiguous.
    """
    q, k, _, block_indices, _, layout, *_ = arguments
    (batch, seqlen), kv_heads = q.shape[:2], k.shape[2]
    sizes = sizes_of(arguments)
    group, repeats, num_selected, block_size, causal = sizes[:5]
    dfactors = q.new_empty(batch * kv_heads, seqlen, repeats, num_selected, dtype=torch.float32)
    # Each index has an entry in the CSR index, and a number per head.
    most = max(1, WORKSPACE // (4 * repeats * num_selected * (group + 1)))
    groups = group_pairs(block_indices, kv_heads, num_block_slots(layout, block_size), max(1, most // max(seqlen, 1)))
    shape = {'kv_heads': kv_heads, 'block_size': block_size, 'causal': causal, 'chunk': 1}
    for pairs, tokens in product(groups, split_evenly(seqlen, most)):
        csr = make_block_to_query(block_indices, layout, pairs, tokens, **shape)
        rows = q.new_empty(len(pairs) * csr.num_entries * group, dtype=torch.float32)
        partials = PartialResults(None, None, None, rows)
        compute_partials(arguments, sizes, (lse, dout, delta, None), partials, csr, pairs, computes_dq=True)
        _add_heads(rows, group, dfactors, pairs, tokens)
    return dfactors.unflatten(0, (batch, kv_heads)).transpose(1, 2).reshape(block_indices.shape)


def _add_heads(rows: Tensor, group: int, dfactors: Tensor, pairs: range, tokens: range) -> None:
    """Add up the gradients of the factors `[rows]` over the heads of a group."""
    out = dfactors[pairs.start : pairs.stop, tokens.start : tokens.stop]
    torch.sum(rows.view(*out.shape, group), -1, out=out)
