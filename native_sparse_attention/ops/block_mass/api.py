"""Mass of full attention by selection block, outside the window: the target of `losses.block_score_loss`."""

from __future__ import annotations

from functools import partial

from torch import Tensor

from native_sparse_attention.core import checks
from native_sparse_attention.core.backend import Candidates, resolver, serves
from native_sparse_attention.core.call import Call, MassRules, make_call
from native_sparse_attention.core.geometry import QueryLayout
from native_sparse_attention.ops._triton import support


def block_mass(
    q: Tensor,
    k: Tensor,
    *,
    block_size: int,
    window_size: tuple[int, int] | None = None,
    share_group: bool = True,
    q_offset: int | Tensor | None = None,
    seqlens_k: Tensor | None = None,
    causal: bool = True,
    scale: float | None = None,
    cu_seqlens: Tensor | None = None,
    cu_seqlens_k: Tensor | None = None,
    softcap: float | None = None,
    backend: str = 'auto',
) -> Tensor:
    """Return the mass of full attention by block: the sum of the weights of a block's keys outside the window.

    The weights are the softmax over all visible keys, those of the window included. Blocks are counted from the first
    key of a sequence.

    Args:
        q: `[B, T, HQ, D]`.
        k: `[B, S, H, D]`.
        block_size: l', keys of a block.
        window_size: (left, right), keys before and after the query's own whose weights do not count; -1 is unbounded.
            None: no window.
        share_group: average the mass over the heads of a group.
        q_offset: as in `selected_attention`.
        seqlens_k: as in `selected_attention`.
        causal: as in `selected_attention`.
        scale: as in `selected_attention`.
        cu_seqlens: as in `selected_attention`.
        cu_seqlens_k: as in `selected_attention`.
        softcap: as in `selected_attention`.
        backend: 'auto', 'triton' or 'eager'.

    Returns:
        `[B, T, H, blocks]` (`[B, T, HQ, blocks]` without share_group) with ceil(S / l') blocks, float32 (float64 for
        float64 inputs), without a gradient. Keys that a query does not see have no mass, nor has a query without keys.

    Raises:
        ValueError: shapes, dtypes or settings do not fit, or an explicit backend does not support the call.
    """
    checks.check_qk(q, k, 'k')
    checks.check_positive(block_size=block_size)
    checks.check_flags(share_group=share_group)
    if window_size is not None:
        window_size = checks.check_window(window_size, causal)
    call, _ = make_call(q, k, None, q_offset, seqlens_k, cu_seqlens, cu_seqlens_k, causal, scale, softcap)
    choice = backend_of(q, k, backend=backend)
    rules = MassRules(block_size, window_size, share_group)
    return mass_at(q, k, call.sequences.layout(), rules, call, choice.name)


def mass_at(q: Tensor, k: Tensor, tokens: QueryLayout, rules: MassRules, call: Call, backend: str) -> Tensor:
    """Run `block_mass` with checked arguments on a resolved backend, for the queries q `[B, R, HQ, D]` that stand where
    `tokens` says.
    """
    match backend:
        case 'triton':
            from native_sparse_attention.ops.block_mass import triton as ops
        case _:
            from native_sparse_attention.ops.block_mass import eager as ops
    return ops.block_mass(q.detach(), k.detach(), tokens, rules, call)


def candidates(q: Tensor, k: Tensor, *, backend: str = 'auto') -> Candidates:
    return {'triton': partial(support.unsupported, q, k), 'eager': serves}


backend_of = resolver('block_mass', candidates)
