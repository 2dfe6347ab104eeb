"""Features of `nsa`: omitted branches, selections and counts, segments, soft caps, sinks, dropout."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from native_sparse_attention import functional, nsa, ops
from tests.definition import definition
from tests.support.problems import (
    Extents,
    Heads,
    assert_agree,
    make_compressed,
    make_mem_kv,
    make_qkv,
    normal,
    packed,
    row_integers,
    whole,
)

SIZES = {'compress_block_size': 5, 'compress_stride': 2, 'selection_block_size': 4}
SELECTION = {'num_selected': 3, 'num_init': 1, 'num_local': 1}
SETTINGS: dict[str, Any] = {**SIZES, **SELECTION, 'window_size': (3, 0)}
HEADS = Heads(6, 2, 4, 3)
GATES = ('gate_0', 'gate_1', 'gate_2')
DROPOUT = {'dropout_p': 0.4, 'dropout_seed': 3}

EXTENTS = {
    'whole': whole(19),
    'rows of their own': Extents(
        2, 6, 18, {'q_offset': row_integers([2, 11]), 'seqlens_k': row_integers([8, 17])}, [8, 17]
    ),
    'packed': packed([0, 3, 11, 0, 8], uncovered=2),
}


def make_inputs(extents: Extents, heads: Heads = HEADS) -> dict[str, Tensor]:
    """Return the tensors of `nsa` by name; every branch has queries, keys and values of its own."""
    names = ('q', 'k', 'v', 'q_cmp', 'k_window', 'v_window', 'k_cmp', 'v_cmp', 'mem_k', 'mem_v')
    block_size, stride = SIZES['compress_block_size'], SIZES['compress_stride']
    compressed = make_compressed(extents, heads, block_size, stride)
    tensors = (*make_qkv(extents, heads), *make_qkv(extents, heads), *compressed, *make_mem_kv(heads, 2))
    inputs = dict(zip(names, tensors, strict=True))
    return inputs | {'gates': torch.rand(extents.batch, extents.seqlen_q, heads.heads, 3).double()}


def call(inputs: dict[str, Any], function: Callable[..., Tensor] = nsa, **settings: Any) -> Tensor:
    """Call `nsa` of inputs with `gates`, or with a triple of them by the names of GATES."""
    inputs = dict(inputs)
    if GATES[0] in inputs:
        inputs['gates'] = tuple(inputs.pop(name) for name in GATES)
    mem_kv = (inputs.pop('mem_k'), inputs.pop('mem_v'))
    return function(**inputs, mem_kv=mem_kv, **SETTINGS | settings)


def assert_calls_agree(inputs: dict[str, Tensor], *calls: Callable[[dict[str, Any]], Tensor]) -> None:
    """Assert that two functions of inputs by name agree, gradients included."""
    first, second = (
        lambda *tensors, run=run: run(dict(zip(inputs, tensors, strict=True))) for run in calls
    )  # fmt: skip
    assert_agree(first, second, *inputs.values())


def by_hand(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    k_cmp: Tensor,
    v_cmp: Tensor,
    gates: Tensor,
    *,
    q_cmp: Tensor,
    k_window: Tensor,
    v_window: Tensor,
    mem_kv: tuple[Tensor, Tensor],
    num_selected: int,
    num_init: int,
    num_local: int,
    window_size: tuple[int, int],
    use_diff_topk: bool = False,
    share_group: bool = True,
    block_counts: int | Tensor | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    sinks_cmp: Tensor | None = None,
    dropout_p: float = 0.0,
    dropout_seed: int | None = None,
    compress_block_size: int,
    compress_stride: int,
    selection_block_size: int,
    **where: Any,
) -> Tensor:
    """Compute the ops one after the other, and their gated sum."""
    sizes = {
        'compress_block_size': compress_block_size,
        'compress_stride': compress_stride,
        'selection_block_size': selection_block_size,
    }
    seqlen_k = {} if 'cu_seqlens' in where else {'seqlen_k': k.shape[1]}
    modified = {**where, 'softcap': softcap, 'backend': 'eager'}
    blocks = {'block_size': compress_block_size, 'stride': compress_stride}
    compressed, lse = ops.compressed_attention(
        q_cmp, k_cmp, v_cmp, **blocks, mem_kv=mem_kv, sinks=sinks_cmp, **seqlen_k, **modified
    )
    forced = {'num_init': num_init, 'num_local': num_local}
    indices = ops.select_blocks(
        *(q_cmp, k_cmp, lse),
        **sizes,
        **forced,
        num_selected=num_selected,
        share_group=share_group,
        block_counts=block_counts,
        **seqlen_k,
        **modified,
    )
    scale = None
    if use_diff_topk:
        scale = ops.straight_through_scale(q_cmp, k_cmp, lse, indices, **sizes, **forced, **seqlen_k, **modified)
    selected, _ = ops.selected_attention(
        q, k, v, indices, block_size=selection_block_size, block_scale=scale, **modified
    )
    dropout = {'dropout_p': dropout_p, 'dropout_seed': dropout_seed}
    window, _ = ops.window_attention(q, k_window, v_window, window_size=window_size, sinks=sinks, **dropout, **modified)
    return (gates[..., None] * torch.stack((compressed, selected, window), 3)).sum(3)


SINKS = {'sinks': (6,), 'sinks_cmp': (6, 2)}
FEATURES: dict[str, dict[str, Any]] = {
    'none': {},
    'softcap': {'softcap': 0.8},
    'sinks': {'sinks': (6,)},
    'sinks of the compressed branch': {'sinks_cmp': (6,)},
    'several sinks': {'sinks': (6, 3), 'sinks_cmp': (6, 2)},
    'dropout': DROPOUT,
    'one count': {'block_counts': 2},
    'counts': {'block_counts': 'drawn'},
    'counts of heads': {'block_counts': 'drawn', 'share_group': False},
    'all': {'softcap': 0.8, 'block_counts': 'drawn', **SINKS, **DROPOUT},
}


def draw(features: dict[str, Any], extents: Extents) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Return inputs with sinks of the given shapes, and the other settings, with counts."""
    inputs, settings = make_inputs(extents), {**features, **extents.where}
    if settings.get('block_counts') == 'drawn':
        settings['block_counts'] = torch.randint(
            -1, 5, (extents.batch, extents.seqlen_q, 2 if settings.get('share_group', True) else 6)
        )
    inputs |= {name: normal(*settings.pop(name)) for name in SINKS if name in settings}
    return inputs, settings


@pytest.mark.parametrize('extents', EXTENTS.values(), ids=EXTENTS)
@pytest.mark.parametrize('use_diff_topk', [False, True])
@pytest.mark.parametrize('features', FEATURES.values(), ids=FEATURES)
def test_is_the_sum_of_the_ops(features: dict[str, Any], use_diff_topk: bool, extents: Extents) -> None:
    inputs, settings = draw(features, extents)
    settings['use_diff_topk'] = use_diff_topk
    assert_calls_agree(
        inputs, lambda given: call(given, nsa, **settings), lambda given: call(given, by_hand, **settings)
    )


@pytest.mark.parametrize('extents', EXTENTS.values(), ids=EXTENTS)
@pytest.mark.parametrize('causal', [True, False])
@pytest.mark.parametrize(
    'features', [FEATURES[name] for name in FEATURES if name not in ('none', 'dropout', 'all')], ids=str
)
def test_definition(features: dict[str, Any], causal: bool, extents: Extents) -> None:
    inputs, settings = draw(features, extents)
    settings |= {'causal': causal, 'window_size': (3, 0 if causal else 2)}
    assert_calls_agree(
        inputs, lambda given: call(given, **settings), lambda given: call(given, definition.nsa, **settings)
    )


SUBSETS = [subset for count in (1, 2, 3) for subset in itertools.combinations(range(3), count)]
ATTENTIONS = ('compressed_attention', 'selected_attention', 'window_attention')
UNUSED = {0: ('v_cmp', 'mem_v'), 1: ('k', 'v'), 2: ('k_window', 'v_window')}


@pytest.mark.parametrize('use_diff_topk', [False, True])
@pytest.mark.parametrize('subset', SUBSETS, ids=str)
def test_branches_left_out(subset: tuple[int, ...], use_diff_topk: bool) -> None:
    """Omitted branches equal branches with closed gates, and their inputs are not read."""
    inputs = make_inputs(whole(19))
    gates = inputs.pop('gates')
    triple = {f'gate_{branch}': gates[..., branch].contiguous() for branch in subset}

    def with_zeros(given: dict[str, Any]) -> Tensor:
        rest = {name: t for name, t in given.items() if not name.startswith('gate_')}
        opened = [given.get(f'gate_{branch}', torch.zeros_like(gates[..., 0])) for branch in range(3)]
        return call(rest | {'gates': torch.stack(opened, -1)}, use_diff_topk=use_diff_topk)

    def with_none(given: dict[str, Any]) -> Tensor:
        unused = [name for branch in set(range(3)) - set(subset) for name in UNUSED[branch]]
        poisoned = {name: torch.full_like(inputs[name], torch.nan) for name in unused}
        return call(dict.fromkeys(GATES) | given | poisoned, use_diff_topk=use_diff_topk)

    assert_calls_agree(inputs | triple, with_none, with_zeros)


@pytest.mark.parametrize('subset', SUBSETS, ids=str)
def test_only_needed_results_are_computed(subset: tuple[int, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    called = []
    inner = {name: (getattr(functional, name), 'attend') for name in ATTENTIONS}
    for name, (op, function) in (inner | {'select_blocks': (functional.block_selection, 'select')}).items():
        run = getattr(op, function)
        monkeypatch.setattr(op, function, lambda *args, n=name, run=run, **kw: (called.append(n), run(*args, **kw))[1])
    inputs = make_inputs(whole(19))
    gates = [gate if branch in subset else None for branch, gate in enumerate(inputs.pop('gates').unbind(-1))]
    call(inputs | {'gates': gates}, choose=functional.select_blocks)
    expected = {'compressed_attention'} if {0, 1} & set(subset) else set()
    expected |= {'select_blocks', 'selected_attention'} if 1 in subset else set()
    expected |= {'window_attention'} if 2 in subset else set()
    assert sorted(called) == sorted(expected)


def test_a_branch_of_no_blocks_may_be_all_there_is() -> None:
    inputs = make_inputs(whole(9))
    gate = inputs.pop('gates')[..., 1].contiguous().requires_grad_()
    out = call(inputs | {'gates': (None, gate, None), 'k_cmp': None, 'v_cmp': None}, num_selected=0)
    out.sum().backward()
    assert out.eq(0).all()
    assert out.shape == (1, 9, 6, 3)
    assert gate.grad is not None
    assert gate.grad.eq(0).all()


def choose(inputs: dict[str, Tensor], share_group: bool = True, **settings: Any) -> Tensor:
    """Return the selection that `nsa` makes."""
    kept = []

    def keep(*args: Any, **kwargs: Any) -> Tensor:
        kept.append(ops.select_blocks(*args, **kwargs))
        return kept[0]

    call(inputs, choose=keep, share_group=share_group, **settings)
    return kept[0]


def refuse(*_: Any, **__: Any) -> Tensor:
    raise AssertionError('blocks are chosen')


@pytest.mark.parametrize('extents', EXTENTS.values(), ids=EXTENTS)
@pytest.mark.parametrize('share_group', [True, False])
@pytest.mark.parametrize('use_diff_topk', [False, True])
def test_a_given_selection(use_diff_topk: bool, share_group: bool, extents: Extents) -> None:
    inputs = make_inputs(extents)
    indices = choose(inputs, share_group, softcap=0.8, **extents.where)
    settings = {'use_diff_topk': use_diff_topk, 'softcap': 0.8, **extents.where}
    for num_selected in (3, None):
        assert_calls_agree(
            inputs,
            lambda given, n=num_selected: call(given, num_selected=n, block_indices=indices, choose=refuse, **settings),
            lambda given: call(given, share_group=share_group, **settings),
        )


def test_any_given_selection() -> None:
    """Selections per head, in any order, with duplicates and padding, limited by counts."""
    inputs = make_inputs(whole(19))
    indices = torch.randint(-2, 6, (1, 19, 6, 4), dtype=torch.int32)
    counts = torch.randint(-1, 6, (1, 19, 6))
    within = torch.arange(4) < counts[..., None]
    assert_calls_agree(
        inputs,
        lambda given: call(given, num_selected=None, block_indices=indices, block_counts=counts, choose=refuse),
        lambda given: call(given, num_selected=None, block_indices=indices.where(within, -1), choose=refuse),
    )
    none = indices[..., :0]
    assert_calls_agree(
        inputs,
        lambda given: call(given, num_selected=None, block_indices=none, use_diff_topk=True),
        lambda given: call(given, num_selected=0),
    )


def test_without_compressed_keys() -> None:
    """A given selection without a compressed branch."""
    inputs = make_inputs(whole(19))
    indices, gates = choose(inputs), inputs.pop('gates')
    gate_1, gate_2 = gates[..., 1].contiguous(), gates[..., 2].contiguous()
    without = {name: t for name, t in inputs.items() if name not in ('k_cmp', 'v_cmp')} | {
        'gate_1': gate_1,
        'gate_2': gate_2,
    }
    ordered = {'gate_0': None, 'k_cmp': None, 'v_cmp': None}
    settings = {'num_selected': None, 'block_indices': indices}
    assert_calls_agree(
        without,
        lambda given: call(ordered | given, **settings),
        lambda given: call(ordered | given | {'k_cmp': inputs['k_cmp'], 'v_cmp': inputs['v_cmp']}, **settings),
    )


SEGMENTS = [7, 7, 2, 2, 2, 2, 2, 2, 2, 2, 2, -1, -1, -3, 7, 7, 7, 7, 7, 7, 7, 0, 5, -2]


@pytest.mark.parametrize('use_diff_topk', [False, True])
@pytest.mark.parametrize('dtype', [torch.int32, torch.int64])
def test_segments_are_sequences_of_their_own(dtype: torch.dtype, use_diff_topk: bool) -> None:
    runs = [(key, len(list(run))) for key, run in itertools.groupby(SEGMENTS)]
    extents = packed([length for _, length in runs])
    inputs = make_inputs(extents) | {'sinks': normal(6), 'sinks_cmp': normal(6, 2)}
    segment_ids = torch.tensor([SEGMENTS], dtype=dtype)
    settings: dict[str, Any] = {'softcap': 0.8, 'use_diff_topk': use_diff_topk}

    def alone(given: dict[str, Any]) -> Tensor:
        outs, first, first_block = [], 0, 0
        for key, length in runs:
            num_blocks = definition.count_compressed_blocks(length, 5, 2)
            of_tokens, of_blocks = slice(first, first + length), slice(first_block, first_block + num_blocks)
            cut = {name: t[:, of_blocks] if name in ('k_cmp', 'v_cmp') else t for name, t in given.items()}
            whole_tensors = ('k_cmp', 'v_cmp', 'mem_k', 'mem_v', 'sinks', 'sinks_cmp')
            cut = {name: t if name in whole_tensors else t[:, of_tokens] for name, t in cut.items()}
            outs.append(call(cut, **settings) * (key >= 0))
            first, first_block = first + length, first_block + num_blocks
        return torch.cat(outs, 1)

    assert_calls_agree(inputs, lambda given: call(given, segment_ids=segment_ids, **settings), alone)


@pytest.mark.full
@pytest.mark.parametrize('backend', ['eager', 'triton'])
def test_segments_of_padding_give_0_and_are_not_read(backend: str, device: torch.device) -> None:
    ids = torch.tensor([[1] * 6 + [-1] * 7 + [1] * 8 + [-5]], device=device)
    inputs = make_inputs(packed([6, 7, 8, 1])) | {'sinks': normal(6), 'sinks_cmp': normal(6, 2)}
    inputs = {name: t.float().to(device) for name, t in inputs.items()}
    per_block = torch.tensor([[False, True, True, False, False]], device=device)  # 1, 2 and 2 blocks, and no other
    results = []
    for garbage in (1.0, torch.nan):
        leaves = {}
        for name, t in inputs.items():
            at = {5: per_block, 22: ids < 0}.get(t.shape[1]) if t.dim() == 4 else None
            t = t.clone() if at is None else t.masked_fill(at[..., None, None], garbage)
            leaves[name] = t.requires_grad_()
        out = call(leaves, segment_ids=ids, backend=backend, use_diff_topk=backend == 'eager')
        assert out[ids < 0].eq(0).all()
        out.sin().sum().backward()
        results.append([out, *(t.grad for t in leaves.values())])
        assert all(bool(t.isfinite().all()) for t in results[-1])
    assert all(a.equal(b) for a, b in zip(*results, strict=True))


def test_gradcheck() -> None:
    extents, heads = Extents(1, 3, 12, {}, [12]), Heads(4, 2, 2, 2)
    inputs = make_inputs(extents, heads) | {'sinks': normal(4), 'sinks_cmp': normal(4, 2)}
    inputs |= {f'gate_{branch}': gate.clone() for branch, gate in enumerate(inputs.pop('gates').unbind(-1))}

    def run(*tensors: Tensor) -> Tensor:
        return call(dict(zip(inputs, tensors, strict=True)), softcap=0.8, **DROPOUT)

    leaves = [t.requires_grad_() for t in inputs.values()]
    assert torch.autograd.gradcheck(run, leaves, fast_mode=True)


def test_dropout_is_a_matter_of_the_seed() -> None:
    inputs = make_inputs(whole(19))
    plain, first, again, other = (
        call(inputs, nsa, **settings)
        for settings in (
            {'dropout_seed': 3},
            DROPOUT,
            {**DROPOUT, 'dropout_seed': torch.tensor([3])},
            {**DROPOUT, 'dropout_seed': 4},
        )
    )
    assert first.equal(again)
    assert not first.equal(other)
    assert plain.equal(call(inputs))
    drawn = []
    for seed in (1, 1, 2):
        torch.manual_seed(seed)
        drawn.append(call(inputs, dropout_p=0.4))
    assert drawn[0].equal(drawn[1])
    assert not drawn[0].equal(drawn[2])


def test_checkpointed_with_a_seed() -> None:
    inputs = make_inputs(whole(19)) | {'sinks': normal(6), 'sinks_cmp': normal(6, 2)}

    def attend(given: dict[str, Any]) -> Tensor:
        return call(given, use_diff_topk=True, softcap=0.8, **DROPOUT)

    assert_calls_agree(inputs, lambda given: checkpoint(attend, given, use_reentrant=False), attend)  # type: ignore[arg-type]


@pytest.mark.parametrize('dtype', [torch.bfloat16, torch.float16, torch.float32])
def test_dtypes_of_gates_and_sinks(dtype: torch.dtype) -> None:
    inputs: dict[str, Any] = {name: t.to(dtype) for name, t in make_inputs(whole(19)).items()}
    gates = inputs.pop('gates')
    mixed = (gates[..., 0].float(), gates[..., 1].double().to(torch.bfloat16), gates[..., 2].half())
    expected = torch.stack([gate.float() for gate in mixed], -1)
    results = [
        call(inputs | {'gates': g, 'sinks': sinks, 'sinks_cmp': sinks}, softcap=5.0)
        for g, sinks in ((mixed, torch.ones(6, dtype=torch.bfloat16)), (expected, torch.ones(6)))
    ]
    assert results[0].dtype == dtype
    assert results[0].equal(results[1])


@pytest.mark.full
@pytest.mark.parametrize('gates', [(0, 1, 2), (1,), (0, 2)], ids=str)
def test_triton_equals_eager(gates: tuple[int, ...], device: torch.device) -> None:
    """All features at once, and gates of some branches alone."""
    inputs = make_inputs(whole(19)) | {'sinks': normal(6), 'sinks_cmp': normal(6, 2)}
    of_branches = inputs.pop('gates').unbind(-1)
    inputs |= {GATES[branch]: of_branches[branch].contiguous() for branch in gates}
    inputs = {name: t.float().to(device) for name, t in inputs.items()}
    counts = torch.randint(-1, 5, (1, 19, 2), device=device)
    settings = {'softcap': 0.8, 'block_counts': counts, 'use_diff_topk': True, **DROPOUT}
    results = []
    for backend in ('triton', 'eager'):
        leaves = {name: t.clone().requires_grad_() for name, t in inputs.items()}
        out = call(dict.fromkeys(GATES) | leaves, backend=backend, **settings)
        out.sin().sum().backward()
        results.append([out, *(torch.zeros_like(t) if t.grad is None else t.grad for t in leaves.values())])
    for result, expected in zip(*results, strict=True):
        torch.testing.assert_close(result, expected, rtol=1e-4, atol=1e-5)
