"""Gradients of queries by block: each block leaves its part of the gradients of those who chose it.

What must be subtracted from the gradients of all weights of a query, delta, is the sum of p * dp over the keys of all
its blocks. So the lists are gone through twice: for delta, which is exact then, and for the gradients. Those of k and v
are another kernel's (key_gradients.py): beside its sums there is no room for a part of dq.
"""

# To pyright a jit function that another calls never returns.
# pyright: reportGeneralTypeIssues=false

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from native_sparse_attention.ops._triton.inverse_index import load_entries, split_members
from native_sparse_attention.ops._triton.launch import head_block, is_wide, launch, row_block
from native_sparse_attention.ops._triton.softcap import cap_logits, cap_slope
from native_sparse_attention.ops._triton.tiles import add_product, load_rows, split_finite, store_rows
from native_sparse_attention.ops._triton.varlen import SequenceLayout
from native_sparse_attention.ops.selected_attention.triton import settings
from native_sparse_attention.ops.selected_attention.triton.by_block.forward import CHUNK_ROWS, MERGE_ROWS, WORKSPACE
from native_sparse_attention.ops.selected_attention.triton.index.block_to_query import (
    Lists,
    Parts,
    bytes_of_part,
    count_near,
    count_programs,
    find_members,
    find_owners,
    find_unit,
    invert_power,
    load_factors,
    make_inverses,
    make_parts,
    open_chunk,
    sort_columns,
    split_evenly,
    store_part,
)


class MemberGradients:
    """Gradients of q and of the factors, and delta, which those of k and v need: `Members` of keys.py."""

    def __init__(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        block_indices: Tensor,
        block_scale: Tensor | None,
        lse: Tensor,
        dout: Tensor,
        dlse: Tensor | None,
        gate: Tensor | None,
        place: SequenceLayout,
        block_size: int,
        causal: bool,
        scale: float,
        softcap: float | None,
        needs_dfactors: bool,
        grad_dtype: torch.dtype,
    ) -> None:
        """dq, delta and inverses `[B, HQ, T]` and dfactors (float32 `[B * H, T, R, n]`, or None) are filled while lists
        are gone through.
        """
        self.q, self.k, self.v, self.block_scale, self.lse = q, k, v, block_scale, lse
        self.dout, self.dlse, self.gate, self.place = dout, dlse, gate, place
        self.causal, self.scale, self.softcap = causal, scale, softcap
        index_heads, self.num_selected = block_indices.shape[2:]
        self.block_size = min(block_size, k.shape[1])
        self.group, self.repeats = q.shape[2] // index_heads, index_heads // k.shape[2]
        parts_of_token = self.repeats * self.num_selected * self.group
        # What a row of the batch has besides: delta and inverses.
        workspace = max(WORKSPACE - 2 * lse[:1].numel() * lse.element_size(), WORKSPACE // 2)
        self.most_tokens = max(1, workspace // max(1, parts_of_token * (bytes_of_part(q, q.shape[3]) + 4)))
        self.most_sums = max(1, workspace // max(1, parts_of_token * bytes_of_part(q, 0)))
        # Parts of all pairs need not be there together, but ranges of tokens are those of one.
        self.most_pairs = q.shape[0] * k.shape[2] if q.shape[1] <= self.most_tokens else 1
        self.dq = q.new_empty(q.shape, dtype=grad_dtype)
        self.delta = torch.empty_like(lse)
        self.inverses = make_inverses(lse, q.dtype)
        shape = (q.shape[0] * k.shape[2], q.shape[1], self.repeats, self.num_selected)
        self.dfactors = q.new_empty(shape, dtype=torch.float32) if needs_dfactors else None
        self.dlogits = None  # a row of few heads has parts of dq, which are smaller

    def prepare(self, lists: Lists, pairs: range, tokens: range) -> None:
        """delta, and then the gradients, of the tokens for as many pairs at a time as there is room for: of delta for
        more, whose parts are numbers.
        """
        for finishes, most in ((False, self.most_sums), (True, self.most_tokens)):
            for some in split_evenly(len(pairs), max(1, most // max(1, len(tokens)))):
                self._differentiate(lists.of(some), pairs[some.start : some.stop], tokens, finishes)

    def _differentiate(self, lists: Lists, pairs: range, tokens: range, finishes: bool) -> None:
        rows = len(pairs) * lists.num_entries * self.group
        dfactors = self.dfactors if finishes else None
        parts = make_parts(self.q, rows, self.q.shape[3] if finishes else 0, dfactors is not None)
        self._visit_blocks(parts, lists, pairs, finishes)
        self._add_parts(parts, lists, pairs, tokens, finishes)
        if dfactors is not None:
            dfactors = dfactors[pairs.start : pairs.stop, tokens.start : tokens.stop]
            torch.sum(parts.second.view(*dfactors.shape, self.group), -1, out=dfactors)

    def finish(self, lists: Lists, pairs: range, tokens: range) -> None:
        """Nothing: all is done before the gradients of k and v."""

    def _visit_blocks(self, parts: Parts, lists: Lists, pairs: range, finishes: bool) -> None:
        """Parts of delta, or else of dq."""
        q, k, v, block_scale, dout = self.q, self.k, self.v, self.block_scale, self.dout
        tables = (settings.BLOCK_DQ, settings.BLOCK_DQ_SHORT) if finishes else (settings.BLOCK, settings.BLOCK_SHORT)
        block_m, _, num_warps, num_stages = settings.settings_of_blocks(*tables, self.block_size, q, v)
        if not finishes:
            num_stages = min(num_stages, 2)  # twice as much is fetched ahead as forward, q and dout
        chunk = max(1, CHUNK_ROWS // self.group)
        num_programs = count_programs(lists.num_entries, lists.num_slots, chunk)
        launch(
            member_kernel,
            (len(pairs) * num_programs,),
            *(q, k, v, block_scale, self.lse, dout, self.delta, self.inverses, parts),
            *(q.stride(), k.stride(), v.stride(), None if block_scale is None else block_scale.stride()),
            *(dout.stride(), self.place, lists._replace(num_programs=num_programs), self.scale, self.softcap),
            FINISHES=finishes,
            GROUP=self.group,
            REPEATS=self.repeats,
            NUM_SELECTED=self.num_selected,
            BLOCK_SIZE=self.block_size,
            CAUSAL=self.causal,
            CHUNK=chunk,
            INT64_OFFSETS=is_wide(q, dout, self.lse, block_scale),
            HEAD_DIM=q.shape[3],
            VALUE_DIM=v.shape[3],
            BLOCK_M=block_m,
            BLOCK_N=row_block(self.block_size),
            BLOCK_D=head_block(q.shape[3]),
            BLOCK_DV=head_block(v.shape[3]),
            num_warps=num_warps,
            num_stages=num_stages,
            device=q.device,
        )

    def _add_parts(self, parts: Parts, lists: Lists, pairs: range, tokens: range, finishes: bool) -> None:
        """delta, or else dq."""
        dlse, gate = self.dlse, self.gate
        launch(
            add_parts_kernel,
            (len(pairs) * -(-len(tokens) * self.repeats * self.group // MERGE_ROWS),),
            *(parts, self.delta, self.inverses, self.lse, dlse, gate, self.dq),
            *(None if t is None else t.stride() for t in (dlse, gate)),
            self.dq.stride(),
            *(self.place, lists, len(tokens), self.scale),
            FINISHES=finishes,
            GROUP=self.group,
            REPEATS=self.repeats,
            NUM_SELECTED=self.num_selected,
            HEAD_DIM=self.q.shape[3],
            UNROLLED=min(self.num_selected, 4),
            BLOCK_M=MERGE_ROWS,
            BLOCK_D=head_block(self.q.shape[3]),
            num_warps=4,
            device=self.q.device,
        )


@triton.jit
def member_kernel(
    q_ptr,
    k_ptr,
    v_ptr,
    factors_ptr,
    lse_ptr,
    dout_ptr,
    delta_ptr,
    inverses_ptr,
    parts,
    q_strides,
    k_strides,
    v_strides,
    factors_strides,
    dout_strides,
    place,
    lists,
    scale,
    softcap,
    FINISHES: tl.constexpr,
    GROUP: tl.constexpr,
    REPEATS: tl.constexpr,
    NUM_SELECTED: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    CAUSAL: tl.constexpr,
    CHUNK: tl.constexpr,
    INT64_OFFSETS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_DV: tl.constexpr,
):
    """Of up to CHUNK entries of a list: parts of dq, and in `second` of the factors (FINISHES), or else in `first` the
    sum of p * dp over the keys of a block, and in `unit` that of their absolute values, at least 2 ** -100, where parts
    are float16. inverses: of units of the gradients of the logits, where parts are float16, or None. One program per
    pair and chunk. BLOCK_N holds a whole block.
    """
    num_entries, entries_ptr, pair, row, kv_head, key_start, keys, key_mask, offset = open_chunk(
        tl.program_id(0), place, lists, parts, GROUP, BLOCK_SIZE, CHUNK, BLOCK_N
    )
    if num_entries <= 0:
        return
    k_ptr += row * k_strides[0] + kv_head * k_strides[2]
    v_ptr += row * v_strides[0] + kv_head * v_strides[2]
    k = load_rows(k_ptr, key_start + keys, k_strides[1], key_mask, HEAD_DIM, BLOCK_D)  # [BLOCK_N, BLOCK_D]
    v = load_rows(v_ptr, key_start + keys, v_strides[1], key_mask, VALUE_DIM, BLOCK_DV)  # [BLOCK_N, BLOCK_DV]
    num_near = count_near(
        entries_ptr, num_entries, keys, key_mask, offset, lists, BLOCK_SIZE, CAUSAL, CHUNK, REPEATS, NUM_SELECTED
    )
    num_members = num_entries * GROUP
    first_far = tl.cdiv(num_near * GROUP, BLOCK_M) * BLOCK_M
    num_heads = lists.kv_heads * REPEATS * GROUP
    q_ptr += row * q_strides[0]
    dout_ptr += row * dout_strides[0]
    lse_ptr += row * num_heads * place.seqlen_q
    delta_ptr += row * num_heads * place.seqlen_q
    if inverses_ptr is not None:
        inverses_ptr += row * num_heads * place.seqlen_q
    inputs = (q_ptr, factors_ptr, dout_ptr, inverses_ptr, q_strides, factors_strides, dout_strides)
    sources = (entries_ptr, lse_ptr, delta_ptr, inverses_ptr, num_members, kv_head, place.seqlen_q, lists)
    # For parts: keys of which a member does not read some must be finite; all others are multiples of a unit.
    finite_k, largest, unit = k, 0.0, 1.0
    if FINISHES:
        finite_k, _ = split_finite(k)
        largest = tl.max(tl.abs(finite_k.to(tl.float32)), 1)  # [BLOCK_N]
    members = _load_members(sources, 0, FINISHES, GROUP, REPEATS, NUM_SELECTED, INT64_OFFSETS, BLOCK_M)
    # In one stage, since two copies of k leave little shared memory, and such members are few.
    for first_member in tl.range(0, tl.minimum(first_far, num_members), BLOCK_M, num_stages=1):
        following = _load_members(
            sources, first_member + BLOCK_M, FINISHES, GROUP, REPEATS, NUM_SELECTED, INT64_OFFSETS, BLOCK_M
        )
        _add_members(
            inputs, k, v, finite_k, largest, members, first_member, num_members, pair, row, kv_head, keys, key_mask,
            offset, parts, lists, scale, softcap, FINISHES, GROUP, REPEATS, NUM_SELECTED, CAUSAL, INT64_OFFSETS, True,
            HEAD_DIM, VALUE_DIM, BLOCK_M, BLOCK_D, BLOCK_DV,
        )  # fmt: skip
        members = following
    if FINISHES and inverses_ptr is not None:
        # The inverse is a power of two, so no bit of a key is lost that is not 2 ** 126 times as small as the largest.
        unit, inverse = find_unit(tl.max(largest, 0) * 4096)
        k = (k.to(tl.float32) * inverse).to(k.dtype)
    for first_member in tl.range(first_far, num_members, BLOCK_M):
        following = _load_members(
            sources, first_member + BLOCK_M, FINISHES, GROUP, REPEATS, NUM_SELECTED, INT64_OFFSETS, BLOCK_M
        )
        _add_members(
            inputs, k, v, k, unit, members, first_member, num_members, pair, row, kv_head, keys, key_mask, offset,
            parts, lists, scale * unit, softcap, FINISHES, GROUP, REPEATS, NUM_SELECTED, CAUSAL, INT64_OFFSETS, False,
            HEAD_DIM, VALUE_DIM, BLOCK_M, BLOCK_D, BLOCK_DV,
        )  # fmt: skip
        members = following


@triton.jit
def _load_members(
    sources,
    first_member,
    FINISHES: tl.constexpr,
    GROUP: tl.constexpr,
    REPEATS: tl.constexpr,
    NUM_SELECTED: tl.constexpr,
    INT64_OFFSETS: tl.constexpr,
    BLOCK_M: tl.constexpr,
):
    """A tile of members, to be loaded a step ahead: entries, log-sum-exps and, where FINISHES, deltas and inverses."""
    entries_ptr, lse_ptr, delta_ptr, inverses_ptr, num_members, kv_head, seqlen, lists = sources
    entry = load_entries(entries_ptr, first_member, num_members, GROUP, BLOCK_M)
    mask = first_member + tl.arange(0, BLOCK_M) < num_members
    _, in_group = split_members(first_member, GROUP, BLOCK_M)
    token, _, head = find_members(entry, in_group, kv_head, lists, GROUP, REPEATS, NUM_SELECTED)
    places = (head.to(tl.int64) if INT64_OFFSETS else head) * seqlen + token
    lse = tl.load(lse_ptr + places, mask=mask, other=0.0)
    delta, inverse = lse, lse
    if FINISHES:
        delta = tl.load(delta_ptr + places, mask=mask, other=0.0)
        if inverses_ptr is not None:
            inverse = tl.load(inverses_ptr + places, mask=mask, other=0.0)
    return entry, lse, delta, inverse


@triton.jit
def _add_members(
    inputs,
    k,
    v,
    k_of_parts,
    unit,
    members,
    first_member,
    num_members,
    pair,
    row,
    kv_head,
    keys,
    key_mask,
    offset,
    parts,
    lists,
    scale,
    softcap,
    FINISHES: tl.constexpr,
    GROUP: tl.constexpr,
    REPEATS: tl.constexpr,
    NUM_SELECTED: tl.constexpr,
    CAUSAL: tl.constexpr,
    INT64_OFFSETS: tl.constexpr,
    MASKED: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_DV: tl.constexpr,
):
    """The parts of a tile of members. Not MASKED: all of them read all of the keys, and k is in multiples of unit.
    MASKED: k_of_parts is finite, and unit the largest element of every key, so that each member has a unit by what it
    reads. members: from `_load_members`.
    """
    q_ptr, factors_ptr, dout_ptr, inverses_ptr, q_strides, factors_strides, dout_strides = inputs
    entry, lse, delta, inverse = members
    mask = first_member + tl.arange(0, BLOCK_M) < num_members
    _, in_group = split_members(first_member, GROUP, BLOCK_M)
    token, index_head, head = find_members(entry, in_group, kv_head, lists, GROUP, REPEATS, NUM_SELECTED)
    positions = offset + token
    if INT64_OFFSETS:
        token, head = token.to(tl.int64), head.to(tl.int64)
    offsets = token * q_strides[1] + head * q_strides[2]
    q = load_rows(q_ptr, offsets, 1, mask, HEAD_DIM, BLOCK_D)
    offsets = token * dout_strides[1] + head * dout_strides[2]
    dout = load_rows(dout_ptr, offsets, 1, mask, VALUE_DIM, BLOCK_DV)
    lse_log2 = tl.where(lse == float('-inf'), 0.0, lse) * 1.4426950408889634
    factor = tl.full([BLOCK_M], 1.0, tl.float32)
    if factors_ptr is not None:
        factor = load_factors(factors_ptr, factors_strides, row, token, index_head, entry, mask, NUM_SELECTED)
    scale_log2 = scale * 1.4426950408889634 * factor
    products = tl.dot(q, tl.trans(k), input_precision='ieee')  # [BLOCK_M, BLOCK_N]
    if softcap is None:
        weights = tl.exp2(tl.fma(products, scale_log2[:, None], -lse_log2[:, None]))
    else:
        logits_log2 = products * scale_log2[:, None]
        capped_log2 = cap_logits(logits_log2, softcap * 1.4426950408889634)
        weights = tl.exp2(capped_log2 - lse_log2[:, None])
    dweights = tl.dot(dout, tl.trans(v), input_precision='ieee')
    # Always: the next members are fetched before a branch, not behind it (docs/kernels.md).
    if first_member < num_members:
        read = key_mask[None, :] & mask[:, None]
        if CAUSAL:
            read = read & (keys[None, :] <= positions[:, None])
        places = (pair * lists.num_entries + entry) * GROUP + in_group
        if not FINISHES:
            terms = weights * dweights
            if MASKED:
                terms = tl.where(read, terms, 0.0)
            tl.store(parts.first + places, tl.sum(terms, 1), mask=mask)
            units = tl.full([BLOCK_M], 1.0, tl.float32)
            if parts.out.dtype.element_ty == tl.float16:
                units = tl.maximum(tl.sum(tl.abs(terms), 1), 7.888609052210118e-31)
            tl.store(parts.unit + places, units, mask=mask)
        else:
            dlogits = weights * (dweights - delta[:, None])
            if softcap is not None:
                # At most 1, so bounds of gradients hold.
                dlogits *= cap_slope(logits_log2, softcap * 1.4426950408889634)
            logits = products * scale
            if MASKED:
                dlogits = tl.where(read, dlogits, 0.0)
                logits = tl.where(read, logits, 0.0)
            if parts.second is not None:
                tl.store(parts.second + places, tl.sum(dlogits * logits, 1), mask=mask)
            dlogits *= factor[:, None]
            units = tl.full([BLOCK_M], 1.0, tl.float32)
            if inverses_ptr is not None:
                if factors_ptr is not None:
                    # Not without limits: the inverse has to remain a number.
                    inverse *= find_unit(tl.maximum(tl.abs(factor), 5.9604644775390625e-08) * 4096)[1]
                    inverse = tl.maximum(inverse, 1.1754943508222875e-38)
                if MASKED:
                    units_of_k, inverse_of_k = find_unit(tl.max(tl.where(read, unit[None, :], 0.0), 1) * 4096)
                    dlogits *= inverse_of_k[:, None]
                else:
                    units_of_k = unit
                # Neither 0, which says that there is no part, nor more than invert_power takes.
                units = tl.maximum(units_of_k * invert_power(inverse), 1.1754943508222875e-38)
                units = tl.minimum(units, 8.507059173023462e37)
                dlogits *= inverse[:, None]
            dq = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
            dq = add_product(dlogits.to(k_of_parts.dtype), k_of_parts, dq)
            store_part(parts, places, dq, units, mask, HEAD_DIM, BLOCK_D)


@triton.jit
def add_parts_kernel(
    parts,
    delta_ptr,
    inverses_ptr,
    lse_ptr,
    dlse_ptr,
    gate_ptr,
    dq_ptr,
    dlse_strides,
    gate_strides,
    dq_strides,
    place,
    lists,
    num_tokens,
    scale,
    FINISHES: tl.constexpr,
    GROUP: tl.constexpr,
    REPEATS: tl.constexpr,
    NUM_SELECTED: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    UNROLLED: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """delta, `[B, HQ, T]`, from which the gradient of the log-sum-exp is taken, and inverses, of units of the gradients
    of logits (`find_unit`), or None; or else (FINISHES) dq, times the gate `[B, T, HQ]` or None. Of num_tokens tokens;
    one program per tile of their heads.
    """
    mask, row, token, head, places = find_owners(
        tl.program_id(0), lists, num_tokens, GROUP, REPEATS, NUM_SELECTED, BLOCK_M
    )
    num_heads = lists.kv_heads * REPEATS * GROUP
    dq = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    delta = tl.zeros([BLOCK_M], tl.float32)
    spread = tl.zeros([BLOCK_M], tl.float32)
    for first_slot in tl.range(0, NUM_SELECTED, UNROLLED):
        for in_step in tl.static_range(UNROLLED):
            is_slot = mask & (first_slot + in_step < NUM_SELECTED)
            places_of_part = places + (first_slot + in_step) * GROUP
            unit = tl.load(parts.unit + places_of_part, mask=is_slot, other=0.0)
            is_part = unit != 0
            # Not masked by the unit, which they need not wait for then.
            if FINISHES:
                part = load_rows(parts.out, places_of_part, HEAD_DIM, is_slot, HEAD_DIM, BLOCK_D).to(tl.float32)
                dq = tl.fma(tl.where(is_part[:, None], part, 0.0), unit[:, None], dq)
            else:
                term = tl.load(parts.first + places_of_part, mask=is_slot, other=0.0)
                delta += tl.where(is_part, term, 0.0)
                spread += unit
    if FINISHES:
        dq = sort_columns(parts, dq, HEAD_DIM, BLOCK_D)
        if gate_ptr is not None:
            places = row * gate_strides[0] + token * gate_strides[1] + head * gate_strides[2]
            gate = tl.load(gate_ptr + places, mask=mask, other=0.0).to(tl.float32)
            lse = tl.load(lse_ptr + (row * num_heads + head) * place.seqlen_q + token, mask=mask, other=0.0)
            # Of a row that reads nothing it may be anything.
            dq *= tl.where(lse == float('-inf'), 0.0, gate)[:, None]
        dq_ptr += row * dq_strides[0]
        places = token * dq_strides[1] + head * dq_strides[2]
        store_rows(dq_ptr, places, 1, dq * scale, mask, HEAD_DIM, BLOCK_D)
    else:
        places = (row * num_heads + head) * place.seqlen_q + token
        if dlse_ptr is not None:
            dlse_ptr += row * dlse_strides[0] + head * dlse_strides[1] + token * dlse_strides[2]
            dlse = tl.load(dlse_ptr, mask=mask, other=0.0)
            # A log-sum-exp of nothing has no gradient; logaddexp of two such gives NaN.
            lse = tl.load(lse_ptr + places, mask=mask, other=0.0)
            dlse = tl.where(lse == float('-inf'), 0.0, dlse)
            delta -= dlse
            spread += tl.abs(dlse)
        tl.store(delta_ptr + places, delta, mask=mask)
        if inverses_ptr is not None:
            # Over the keys of a block p * (dp - delta) adds up to twice that at most; and p may be a bit off.
            _, inverse = find_unit(4 * spread)
            tl.store(inverses_ptr + places, inverse, mask=mask)
