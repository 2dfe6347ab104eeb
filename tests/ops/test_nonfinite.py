"""Non-finite inputs and gradients of the eager ops affect the outputs and gradients of their readers alone."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from native_sparse_attention import ops
from tests.definition import definition
from tests.ops.test_merged_attention import by_definition as merged_by_definition
from tests.support.problems import normal

SEQLEN, BLOCK, STRIDE, SELECTION_BLOCK = 13, 4, 2, 4
BLOCKS = torch.tensor([[-1, 0], [0, 2], [1, 2], [2, 3], [3, 3]], dtype=torch.int32)
COMPRESSED: dict[str, Any] = {'block_size': BLOCK, 'stride': STRIDE, 'seqlen_k': SEQLEN}
SCORES: dict[str, Any] = {
    'compress_block_size': BLOCK,
    'compress_stride': STRIDE,
    'selection_block_size': SELECTION_BLOCK,
    'seqlen_k': SEQLEN,
}
SELECTED: dict[str, Any] = {'block_size': SELECTION_BLOCK}
MERGED: dict[str, Any] = SELECTED | {'window_size': (2, 0)}
Tensors = dict[str, Tensor]


def make_tokens() -> Tensors:
    return {'q': normal(1, SEQLEN, 4, 3), 'k': normal(1, SEQLEN, 2, 3), 'v': normal(1, SEQLEN, 2, 2)}


def make_blocks() -> Tensors:
    return {'q': normal(1, SEQLEN, 4, 3), 'k_cmp': normal(1, 5, 2, 3), 'v_cmp': normal(1, 5, 2, 2)}


def make_scores() -> Tensors:
    return {'q': normal(1, SEQLEN, 4, 3), 'k_cmp': normal(1, 5, 2, 3), 'lse': 2 + normal(1, 4, SEQLEN)}


def make_selected() -> Tensors:
    return make_tokens() | {'block_scale': 0.5 + torch.rand(1, SEQLEN, 2, 2).double()}


def make_branches() -> Tensors:
    return {'gates': normal(1, 5, 2, 3), **{f'out{index}': normal(1, 5, 2, 4) for index in range(3)}}


def selected_indices() -> Tensor:
    """int32 [1, T, 2, 2]: rows of BLOCKS, with repeats, padding and blocks in the future."""
    rows = torch.arange(SEQLEN)[:, None] + torch.arange(2)
    return BLOCKS[rows % len(BLOCKS)][None]


def selected(function: Callable[..., Any], *tensors: Tensor, **settings: Any) -> Any:
    q, k, v, block_scale = tensors
    return function(q, k, v, selected_indices(), block_scale=block_scale, **settings)


def chosen(function: Callable[..., Any], *tensors: Tensor, **settings: Any) -> Any:
    return function(*tensors, selected_indices(), **settings)


def merged(*tensors: Tensor, **settings: Any) -> Any:
    q, k, v, block_scale = tensors
    return merged_by_definition(q, k, v, selected_indices(), block_scale, names=('block_scale',), **settings)


CASES: dict[str, tuple[Callable[[], Tensors], Callable[..., Any], Callable[..., Any], dict[str, Any]]] = {
    'window': (make_tokens, ops.window_attention, definition.window_attention, {'window_size': (3, 0)}),
    'window, not causal': (
        make_tokens,
        ops.window_attention,
        definition.window_attention,
        {'window_size': (3, 2), 'causal': False},
    ),
    'compressed': (make_blocks, ops.compressed_attention, definition.compressed_attention, COMPRESSED),
    'selected': (
        make_selected,
        partial(selected, ops.selected_attention),
        partial(selected, definition.selected_attention),
        SELECTED,
    ),
    'merged': (make_selected, partial(selected, ops.selected_attention), merged, MERGED),
    'chosen scores': (
        make_scores,
        partial(chosen, ops.chosen_scores),
        partial(chosen, definition.chosen_scores),
        SCORES,
    ),
    'gated sum': (make_branches, ops.gated_sum, definition.gated_sum, {}),
}
WITH_SOFTCAP = [name for name in CASES if name != 'gated sum']


def outputs_and_gradients(
    function: Callable[..., Any], tensors: Tensors, spoil: tuple[int, tuple[int, ...]] | None
) -> dict[str, Tensor]:
    """spoil: an output and the element of it whose gradient is NaN."""
    torch.manual_seed(1)
    leaves = {name: t.clone().requires_grad_() for name, t in tensors.items()}
    outputs = function(*leaves.values())
    outputs = [outputs] if isinstance(outputs, Tensor) else list(outputs)
    grads = [torch.randn(t.shape, dtype=t.dtype) for t in outputs]
    if spoil is not None:
        grads[spoil[0]][spoil[1]] = torch.nan
    found = torch.autograd.grad(outputs, [*leaves.values()], grads, allow_unused=True)
    gradients = {
        name: torch.zeros_like(t) if grad is None else grad
        for (name, t), grad in zip(leaves.items(), found, strict=True)
    }
    return {f'output {index}': t for index, t in enumerate(outputs)} | gradients


def assert_same(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    for name, wanted in expected.items():
        # +inf and -inf count as NaN; the log-sum-exp of a row that reads nothing is -inf.
        a, b = (t if name == 'output 1' else t.where(t.isfinite(), torch.nan) for t in (found[name], wanted))
        torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-9, equal_nan=True, msg=lambda m, n=name: f'{n}: {m}')


def places(name: str, t: Tensor) -> list[tuple[int, ...]]:
    """Return the second head of an early, a middle and a late token or block."""
    heads_first = name in ('lse', 'output 1')
    length = t.shape[2 if heads_first else 1]
    return [(0, 1, token) if heads_first else (0, token, 1) for token in (1, length // 2, length - 1)]


@pytest.mark.parametrize('softcap', [None, 0.8])
@pytest.mark.parametrize('name', CASES)
def test_inputs(name: str, softcap: float | None) -> None:
    make, op, by_definition, settings = CASES[name]
    if softcap is not None:
        if name not in WITH_SOFTCAP:
            pytest.skip('the gated sum has no logits')
        settings = settings | {'softcap': softcap}
    tensors, reached = make(), []
    for poisoned in tensors:
        for place in places(poisoned, tensors[poisoned]):
            spoiled = {key: t.clone() for key, t in tensors.items()}
            spoiled[poisoned][place] = torch.nan
            results = [
                outputs_and_gradients(partial(function, **given), spoiled, None)
                for function, given in ((op, settings | {'backend': 'eager'}), (by_definition, settings))
            ]
            assert_same(*results)
            reached.append(not results[1]['output 0'].isfinite().all())
    assert sum(reached) > len(tensors)


@pytest.mark.parametrize('name', CASES)
def test_gradients(name: str) -> None:
    make, op, by_definition, settings = CASES[name]
    tensors = make()
    outputs = op(*tensors.values(), **settings)
    outputs = [outputs] if isinstance(outputs, Tensor) else list(outputs)
    for index, output in enumerate(outputs):
        for place in places(f'output {index}', output):
            results = [
                outputs_and_gradients(partial(function, **given), tensors, (index, place))
                for function, given in ((op, settings | {'backend': 'eager'}), (by_definition, settings))
            ]
            assert_same(*results)
