"""Compare a few rows of an implementation's outputs with float32."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from benchmarks.peers import Problem
from benchmarks.runner import Case

# Largest error of a row relative to its norm, in half types.
MAX_ERROR = 0.05
# Least share of correct blocks: rounding decides between nearly equal scores.
MIN_AGREEMENT = 0.9
# A row of one token: [HQ, DV].
Row = Callable[[Problem, int, int], Tensor]


def judge(
    problem: Problem,
    forward: Callable[[], Tensor],
    leaves: list[Tensor],
    gold: Row,
    typical: bool = False,
) -> Case:
    """Return the error of a few rows, and a note if it is too large or a gradient is not finite.

    typical: the median error counts, not the largest: rounding decides which of two similar blocks is selected.
    """
    out = forward()
    finite = True
    if leaves:
        gradients = torch.autograd.grad(out, leaves, torch.randn_like(out))
        finite = all(bool(t.sum(dtype=torch.float32).isfinite()) for t in gradients)
    errors = [error for place in places(problem) for error in row_errors(problem, out[place], gold(problem, *place))]
    # max and median return NaN if an error is NaN.
    error = float(torch.tensor(errors).median() if typical else torch.tensor(errors).max())
    if not error <= MAX_ERROR:
        return {'error': error, 'wrong': True, 'note': f'wrong: a row is off by {error:.2g} of its norm'}
    return {'error': error} | ({} if finite else {'wrong': True, 'note': 'wrong: a gradient is not finite'})


def judge_blocks(problem: Problem, blocks: Tensor) -> Case:
    """Return the share of the blocks that float32 selects among blocks `[N, L, H, n]`, in a few rows."""
    found = [
        (torch.isin(gold, chosen) & (gold >= 0)).sum() / (gold >= 0).sum()
        for place in places(problem)
        for gold, chosen in zip(chosen_blocks(problem, *place), blocks[place], strict=True)
    ]
    agreement = float(torch.stack(found).mean())
    if agreement < MIN_AGREEMENT:
        return {'agreement': agreement, 'wrong': True, 'note': f'wrong: {100 * agreement:.0f} % of the blocks'}
    return {'agreement': agreement}


def places(problem: Problem) -> list[tuple[int, int]]:
    """Return (sequence, token) pairs. Tokens without a visible compressed block are left out: peers differ there."""
    count, length = problem.size
    first = min(length - 1, problem.shape.compress_block_size)
    tokens = torch.linspace(first, length - 1, 4).int().tolist()
    return [(sequence, token) for sequence in sorted({0, count - 1}) for token in tokens]


def row_errors(problem: Problem, out: Tensor, gold: Tensor) -> list[float]:
    """Return the error of each KV head of `[HQ, DV]`, relative to its norm."""
    out, gold = (t.detach().float().reshape(problem.shape.kv_heads, -1) for t in (out, gold))
    return ((out - gold).norm(dim=1) / gold.norm(dim=1)).tolist()


def attend(problem: Problem, sequence: int, token: int, keys: Tensor, values: Tensor, mask: Tensor) -> Tensor:
    """Return `[HQ, DV]`: attention to keys and values `[keys, H, ·]` where mask `[keys]` or `[H, keys]` is true."""
    weights = weigh_keys(problem, sequence, token, keys, mask)
    return torch.einsum('hgk,khd->hgd', weights, values.float()).flatten(0, 1)


def weigh_keys(problem: Problem, sequence: int, token: int, keys: Tensor, mask: Tensor) -> Tensor:
    q = problem.q[sequence, token].float().unflatten(0, (problem.shape.kv_heads, -1))
    logits = torch.einsum('hgd,khd->hgk', q, keys.float()) * problem.scale
    mask = mask if mask.dim() == 2 else mask[None]
    return logits.masked_fill(~mask[:, None], -torch.inf).softmax(-1)


def visible_blocks(problem: Problem, token: int) -> Tensor:
    """Return bool `[C]`: the compressed blocks that a token sees."""
    shape = problem.shape
    last = torch.arange(problem.num_compressed, device=problem.device) * shape.compress_stride
    return last + shape.compress_block_size - 1 <= token


def compressed_row(problem: Problem, sequence: int, token: int) -> Tensor:
    keys, values = (problem.tensors[name][sequence] for name in ('k_cmp', 'v_cmp'))
    return attend(problem, sequence, token, keys, values, visible_blocks(problem, token))


def chosen_blocks(problem: Problem, sequence: int, token: int, num_recent: int = 0) -> Tensor:
    """Return `[H, n]` by equation 9 of the paper, with the first and two local blocks forced, padded with -1.

    num_recent: as in `select_blocks`.
    """
    shape, keys = problem.shape, problem.tensors['k_cmp'][sequence]
    own = (token - num_recent) // problem.block_size
    if own < 0:
        return torch.full((shape.kv_heads, shape.num_selected), -1, device=problem.device)
    # [H, C]
    weights = weigh_keys(problem, sequence, token, keys, visible_blocks(problem, token)).sum(1).double()
    start = torch.arange(problem.num_compressed, device=problem.device) * shape.compress_stride
    # Each token of a compressed block has its weight; a selection block sums the weights of its tokens.
    edges = weights.new_zeros(len(weights), max(problem.size[1], (own + 1) * problem.block_size) + 1)
    edges.index_add_(1, start, weights).index_add_(1, start + shape.compress_block_size, -weights)
    of_tokens = edges.cumsum(1)[:, : (own + 1) * problem.block_size]
    scores = of_tokens.unflatten(1, (own + 1, problem.block_size)).sum(2)
    scores[:, torch.tensor(sorted({0, max(0, own - 1), own}), device=problem.device)] = torch.inf
    order = scores.sort(descending=True, stable=True).indices[:, : shape.num_selected]
    return torch.nn.functional.pad(order, (0, shape.num_selected - order.shape[1]), value=-1)


def selected_row(problem: Problem, sequence: int, token: int, blocks: Tensor | None = None) -> Tensor:
    """Return the selected branch of one token. blocks: `[H, n]`, by default those of the problem."""
    blocks = problem.blocks[sequence, token] if blocks is None else blocks
    keys, values = (t[sequence, : token + 1] for t in (problem.k, problem.v))
    block = torch.arange(token + 1, device=problem.device) // problem.block_size
    mask = torch.stack([torch.isin(block, chosen.long()) for chosen in blocks])
    return attend(problem, sequence, token, keys, values, mask)


def window_row(problem: Problem, sequence: int, token: int) -> Tensor:
    near = slice(max(0, token + 1 - problem.shape.window), token + 1)
    keys, values = (t[sequence, near] for t in (problem.k, problem.v))
    return attend(problem, sequence, token, keys, values, torch.ones(len(keys), dtype=torch.bool, device=keys.device))


def sum_row(problem: Problem, sequence: int, token: int) -> Tensor:
    gates, *branches = (problem.tensors[name][sequence, token].float() for name in ('gates', *BRANCHES))
    return torch.einsum('hi,ihd->hd', gates, torch.stack(branches))


def nsa_row(problem: Problem, sequence: int, token: int) -> Tensor:
    place = (sequence, token)
    chosen = selected_row(problem, *place, chosen_blocks(problem, *place))
    branches = torch.stack([compressed_row(problem, *place), chosen, window_row(problem, *place)])
    return torch.einsum('hi,ihd->hd', problem.tensors['gates'][place].float(), branches)


def merged_row(problem: Problem, sequence: int, token: int) -> Tensor:
    """Return one token of merged attention with blocks selected before the window.

    The gate of the compressed output and the output gate are the first two of `gates`.
    """
    window, device = problem.shape.window, problem.device
    keys, values = (t[sequence, : token + 1] for t in (problem.k, problem.v))
    position = torch.arange(token + 1, device=device)
    blocks = chosen_blocks(problem, sequence, token, num_recent=window)
    chosen = torch.stack([torch.isin(position // problem.block_size, of_head) for of_head in blocks])
    merged = attend(problem, sequence, token, keys, values, chosen | (position > token - window))
    of_compressed, of_sum = problem.tensors['gates'][sequence, token, :, :2].float().split(1, -1)
    return of_sum * (of_compressed * compressed_row(problem, sequence, token) + merged)


def dense_row(problem: Problem, sequence: int, token: int) -> Tensor:
    keys, values = (t[sequence, : token + 1] for t in (problem.k, problem.v))
    return attend(problem, sequence, token, keys, values, torch.ones(len(keys), dtype=torch.bool, device=keys.device))


BRANCHES = ('compressed', 'selected', 'window')
