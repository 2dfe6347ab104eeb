"""`parallel_nsa` with the arguments of flash-linear-attention, against its definition."""

from __future__ import annotations

import inspect
from typing import Any, NamedTuple

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from native_sparse_attention.integrations.fla import parallel_nsa
from native_sparse_attention.testing import ROW_LIMITS, row_errors
from tests.support.problems import assert_agree, cumulative, normal

GATES = ('g_cmp', 'g_slc', 'g_swa')


class Sequence(NamedTuple):
    """Location of the queries and keys of a sequence; queries are at the end of the keys."""

    row: int
    first_query: int
    num_queries: int
    first_key: int
    num_keys: int


def reference(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g_cmp: Tensor | None = None,
    g_slc: Tensor | None = None,
    g_swa: Tensor | None = None,
    block_indices: Tensor | None = None,
    block_counts: Tensor | int = 16,
    block_size: int = 64,
    window_size: int = 0,
    scale: float | None = None,
    cu_seqlens: Tensor | tuple[Tensor, Tensor] | None = None,
) -> Tensor:
    """Compute in float64, one query and head after the other; block_indices may be longer than block_counts."""
    factor = q.shape[-1] ** -0.5 if scale is None else scale
    group_size = q.shape[2] // k.shape[2]
    out = torch.zeros(*q.shape[:3], v.shape[-1], dtype=torch.float64)
    for sequence in sequences(q, k, cu_seqlens):
        row, first_query, num_queries, first_key, num_keys = sequence
        keys, values = (t[row, first_key : first_key + num_keys].double() for t in (k, v))
        complete = num_keys // block_size
        k_cmp, v_cmp = ([mean(t, c, block_size) for c in range(complete)] for t in (keys, values))
        for i in range(num_queries):
            t, position = first_query + i, num_keys - num_queries + i
            for kv_head in range(k.shape[2]):
                heads = range(kv_head * group_size, (kv_head + 1) * group_size)
                # a block is visible when its last token is
                seen = [c for c in range(complete) if (c + 1) * block_size - 1 <= position]
                weights = {
                    head: softmax([factor * q[row, t, head].double() @ k_cmp[c][kv_head] for c in seen])
                    for head in heads
                }
                count = block_counts if isinstance(block_counts, int) else int(block_counts[row, t, kv_head])
                if block_indices is None:
                    score = {c: sum(float(weights[head][n].detach()) for head in heads) for n, c in enumerate(seen)}
                    blocks = chosen(position, block_size, score)[: max(count, 0)]
                else:
                    blocks = block_indices[row, t, kv_head].tolist()
                    if not isinstance(block_counts, int):
                        blocks = blocks[: max(count, 0)]
                in_blocks = [p for p in range(max(0, min(position + 1, num_keys))) if p // block_size in blocks]
                in_window = [p for p in range(num_keys) if position - window_size < p <= position]
                for head in heads:
                    query = factor * q[row, t, head].double()
                    result = read(query, keys[:, kv_head], values[:, kv_head], in_blocks)
                    if g_slc is not None:
                        result = result * g_slc[row, t, head]
                    if g_cmp is not None and seen:
                        summary = sum(weights[head][n] * v_cmp[c][kv_head] for n, c in enumerate(seen))
                        result = result + g_cmp[row, t, head] * summary
                    if window_size > 0:
                        assert g_swa is not None
                        recent = read(query, keys[:, kv_head], values[:, kv_head], in_window)
                        result = result + g_swa[row, t, head] * recent
                    out[row, t, head] = result
    return out


def sequences(q: Tensor, k: Tensor, cu_seqlens: Tensor | tuple[Tensor, Tensor] | None) -> list[Sequence]:
    if cu_seqlens is None:
        return [Sequence(row, 0, q.shape[1], 0, k.shape[1]) for row in range(q.shape[0])]
    borders = (cu_seqlens, cu_seqlens) if isinstance(cu_seqlens, Tensor) else cu_seqlens
    of_queries, of_keys = (border.tolist() for border in borders)
    return [
        Sequence(0, of_queries[n], of_queries[n + 1] - of_queries[n], of_keys[n], of_keys[n + 1] - of_keys[n])
        for n in range(len(of_queries) - 1)
    ]


def mean(tokens: Tensor, block: int, block_size: int) -> Tensor:
    return tokens[block * block_size : (block + 1) * block_size].sum(0) / block_size


def softmax(logits: list[Tensor]) -> Tensor:
    return torch.stack(logits).softmax(0) if logits else torch.zeros(0, dtype=torch.float64)


def chosen(position: int, block_size: int, score: dict[int, float]) -> list[int]:
    """Return every block that has begun: the own, the first and the one before the own, then others by score."""
    own = position // block_size
    forced = [j for j in dict.fromkeys((own, 0, own - 1)) if 0 <= j <= own]
    others = [j for j in range(own + 1) if j not in forced]
    return forced + sorted(others, key=lambda j: (-score[j], j))


def read(query: Tensor, keys: Tensor, values: Tensor, positions: list[int]) -> Tensor:
    if not positions:
        return torch.zeros(values.shape[-1], dtype=torch.float64)
    return softmax([query @ keys[p] for p in positions]) @ values[positions]


class Problem(NamedTuple):
    inputs: dict[str, Tensor]  # float64
    settings: dict[str, Any]

    def agrees(self) -> None:
        names = list(self.inputs)

        def call(function: Any) -> Any:
            return lambda *tensors: function(**dict(zip(names, tensors, strict=True)), **self.settings)

        assert_agree(call(parallel_nsa), call(reference), *self.inputs.values())


def make_problem(
    lengths: list[tuple[int, int]],
    *,
    kv_heads: int = 2,
    group_size: int = 2,
    gates: tuple[str, ...] = GATES,
    counts: int | None = 3,
    width: int | None = None,
    uncovered: int = 0,
    packed: bool = True,
    pair: bool = False,
    **settings: Any,
) -> Problem:
    """lengths: (queries, keys) of the sequences; not packed: of every row. counts: None for a tensor. width: entries of
    block_indices, None for none. uncovered: tokens that belong to no sequence, whose keys and
    values are NaN.
    """
    if packed:
        of_queries, of_keys = (cumulative([pair[n] for pair in lengths]) for n in range(2))
        settings['cu_seqlens'] = (of_queries.long(), of_keys.long()) if pair else of_queries
        batch, seqlen_q, seqlen_k = 1, int(of_queries[-1]) + uncovered, int(of_keys[-1]) + uncovered
    else:
        batch, (seqlen_q, seqlen_k) = len(lengths), lengths[0]
    heads = kv_heads * group_size
    inputs = {'q': normal(batch, seqlen_q, heads, 4), 'k': normal(batch, seqlen_k, kv_heads, 4)}
    inputs |= {'v': normal(batch, seqlen_k, kv_heads, 3)}
    for name in ('k', 'v'):
        inputs[name][:, seqlen_k - uncovered :] = torch.nan
    inputs |= {name: torch.rand(batch, seqlen_q, heads).double() for name in gates}
    settings = {'block_size': 3, 'window_size': 4 if 'g_swa' in gates else 0, **settings}
    settings['block_counts'] = torch.randint(-1, 6, (batch, seqlen_q, kv_heads)) if counts is None else counts
    if width is not None:
        settings['block_indices'] = torch.randint(-2, 8, (batch, seqlen_q, kv_heads, width))
    return Problem(inputs, settings)


def test_signature():
    """All arguments can be given by position, as in flash-linear-attention."""
    expected = 'q k v g_cmp g_slc g_swa block_indices block_counts block_size window_size scale cu_seqlens'
    parameters = inspect.signature(parallel_nsa).parameters.values()
    positional = [p for p in parameters if p.kind is p.POSITIONAL_OR_KEYWORD]
    assert ' '.join(p.name for p in positional) == expected
    assert [p.default for p in positional[3:]] == [None, None, None, None, 16, 64, 0, None, None]


lengths = st.integers(0, 14)


@pytest.mark.parametrize('kind', ['rows', 'packed', 'pair'])
@given(
    data=st.data(),
    group_size=st.sampled_from([1, 2, 3]),
    gates=st.sets(st.sampled_from(GATES)),
    counts=st.sampled_from([None, 0, 1, 2, 3, 5, 16]),
    width=st.sampled_from([None, 0, 1, 4]),
    block_size=st.integers(1, 5),
    window_size=st.integers(0, 6),
    scale=st.sampled_from([None, 0.3]),
)
def test_definition(
    data: st.DataObject,
    kind: str,
    group_size: int,
    gates: set[str],
    counts: int | None,
    width: int | None,
    block_size: int,
    window_size: int,
    scale: float | None,
) -> None:
    if kind == 'rows':
        seqlen_k = data.draw(lengths)
        drawn = [(data.draw(st.integers(0, seqlen_k)), seqlen_k)] * data.draw(st.integers(1, 2))
    else:
        drawn = [(n, n) for n in data.draw(st.lists(lengths, min_size=1, max_size=3))]
        if kind == 'pair':
            drawn = [(data.draw(st.integers(0, n)), n) for _, n in drawn]
    make_problem(
        drawn,
        group_size=group_size,
        kv_heads=data.draw(st.integers(1, 2)),
        gates=tuple(name for name in GATES if name in gates),
        counts=counts,
        width=data.draw(st.integers(0, 4)) if width is None and 'g_cmp' not in gates else width,
        uncovered=data.draw(st.integers(0, 2)) if kind != 'rows' else 0,
        packed=kind != 'rows',
        pair=kind == 'pair',
        block_size=block_size,
        window_size=window_size if 'g_swa' in gates else 0,
        scale=scale,
    ).agrees()


@pytest.mark.parametrize('counts', [4, None])
@pytest.mark.parametrize('group_size', [1, 3, 5, 16])
def test_any_group(group_size: int, counts: int | None):
    make_problem([(7, 7), (0, 0), (16, 16)], kv_heads=1, group_size=group_size, counts=counts).agrees()


@pytest.mark.parametrize('width', [None, 4])
@pytest.mark.parametrize('gates', [(), *[(name,) for name in GATES], GATES[:2], GATES[1:], GATES[::2], GATES])
def test_gates(gates: tuple[str, ...], width: int | None):
    if width is None and 'g_cmp' not in gates:
        with pytest.raises(ValueError, match='block_indices is None, but must be given where g_cmp is None'):
            make_problem([(11, 11)], gates=gates).agrees()
        return
    make_problem([(11, 11)], gates=gates, width=width, packed=False).agrees()


def test_a_gate_of_a_window_that_is_left_out():
    problem = make_problem([(11, 11)], window_size=0)
    with_gate = parallel_nsa(**problem.inputs, **problem.settings)
    del problem.inputs['g_swa']
    torch.testing.assert_close(parallel_nsa(**problem.inputs, **problem.settings), with_gate, rtol=0, atol=0)


def test_which_blocks_go_first():
    """With few blocks the own block is read, then the first, then the one before the own."""
    problem = make_problem([(12, 12)], gates=('g_cmp',), packed=False)
    position = torch.arange(12)[None, :, None, None].expand(1, 12, 2, 1)
    own = position // 3
    rows = torch.cat([own, torch.zeros_like(own), own - 1], -1)
    for count in range(1, 4):
        settings = {**problem.settings, 'block_counts': count}
        by_hand = parallel_nsa(**problem.inputs, **settings, block_indices=rows[..., :count])
        torch.testing.assert_close(parallel_nsa(**problem.inputs, **settings), by_hand)


@pytest.mark.parametrize('width', [None, 3])
@pytest.mark.parametrize('counts', [3, None])
def test_cached_inference(counts: int | None, width: int | None):
    """The last queries of every sequence have the results of a call with all queries, gradients included."""
    problem = make_problem([(9, 9), (0, 0), (1, 1), (20, 20)], counts=counts, width=width)
    ends, last = [9, 9, 10, 30], [2, 0, 1, 5]
    tail = torch.cat([torch.arange(end - n, end) for end, n in zip(ends, last, strict=True)])
    inputs = {name: t if name in 'kv' else t[:, tail] for name, t in problem.inputs.items()}
    settings: dict[str, Any] = {**problem.settings, 'cu_seqlens': (cumulative(last), problem.settings['cu_seqlens'])}
    for name in ('block_indices', 'block_counts'):
        if isinstance(settings.get(name), Tensor):
            settings[name] = settings[name][:, tail]
    outs, grads = [], []
    calls: list[tuple[dict[str, Any], Any]]
    calls = [({**inputs, **settings}, slice(None)), ({**problem.inputs, **problem.settings}, tail)]
    for arguments, chosen_queries in calls:
        arguments['k'] = problem.inputs['k'].clone().requires_grad_()
        outs.append(parallel_nsa(**arguments)[:, chosen_queries])
        grads.append(torch.autograd.grad(outs[-1].square().sum(), arguments['k'])[0])
    torch.testing.assert_close(*outs)
    torch.testing.assert_close(*grads)


def test_counts_of_more_than_there_are():
    """The largest int32 equals the number of blocks, and takes no memory."""
    problem = make_problem([(17, 17), (6, 6)])
    outs = []
    for count in (2**31 - 1, 23):
        problem.settings['block_counts'] = torch.full((*problem.inputs['q'].shape[:2], 2), count, dtype=torch.int32)
        outs.append(parallel_nsa(**problem.inputs, **problem.settings))
    assert torch.equal(*outs)


def test_rows_of_no_blocks():
    problem = make_problem([(6, 6)], gates=(), width=2)
    problem.settings['block_indices'][:, 2:4] = -1
    leaves = {name: t.clone().requires_grad_() for name, t in problem.inputs.items()}
    out = parallel_nsa(**leaves, **problem.settings)
    assert (out[:, 2:4] == 0).all()
    out.sum().backward()
    for name, leaf in leaves.items():
        assert leaf.grad is not None
        assert leaf.grad.isfinite().all()
        if name == 'q':
            assert (leaf.grad[:, 2:4] == 0).all()
    problem.agrees()


@pytest.mark.parametrize('dtype', [torch.float16, torch.bfloat16])
def test_half_types(dtype: torch.dtype):
    problem = make_problem([(40, 40), (0, 0), (23, 23)], kv_heads=1)
    inputs = {name: t.to(dtype) for name, t in problem.inputs.items()}
    settings = {**problem.settings, 'block_indices': torch.randint(-1, 13, (1, 63, 1, 4)), 'backend': 'eager'}
    out = parallel_nsa(**inputs, **settings)
    gold = parallel_nsa(**{name: t.double() for name, t in inputs.items()}, **settings)
    assert out.dtype == dtype
    assert row_errors(out, gold).max() <= ROW_LIMITS[dtype]


@pytest.mark.full
@pytest.mark.parametrize('counts', [2, None])
@pytest.mark.parametrize(('group_size', 'gates'), [(1, GATES[:1]), (5, GATES)])
def test_kernels(group_size: int, gates: tuple[str, ...], counts: int | None, device: torch.device):
    """The kernels serve any group, with selected blocks and gradients."""
    problem = make_problem(
        [(40, 40), (0, 0), (9, 9)], kv_heads=1, group_size=group_size, gates=gates, counts=counts, block_size=16
    )
    settings: dict[str, Any] = {n: t.to(device) if isinstance(t, Tensor) else t for n, t in problem.settings.items()}
    results = []
    for backend, dtype in (('eager', torch.float64), ('triton', torch.float32)):
        leaves = {n: t.to(device, dtype, copy=True).requires_grad_() for n, t in problem.inputs.items()}
        out = parallel_nsa(**leaves, **settings, backend=backend)
        out.square().sum().backward()
        results.append([out, *(leaf.grad for leaf in leaves.values())])
    for expected, result in zip(*results, strict=True):
        torch.testing.assert_close(result.double(), expected, rtol=1e-4, atol=1e-4)


def ones(*shape: int, **settings: Any) -> Tensor:
    return torch.ones(shape, **settings)


@pytest.mark.parametrize(
    ('arguments', 'message'),
    [
        ({'g_cmp': None}, r'block_indices is None, but must be given where g_cmp is None'),
        ({'g_swa': None}, r'g_swa is None, but must be given where window_size is 4'),
        ({'g_cmp': ones(1, 6, 2)}, r'g_cmp has shape \(1, 6, 2\), but must have \(1, 6, 4\) \(B, T, HQ\)'),
        ({'g_slc': ones(1, 6, 4, dtype=torch.int64)}, r'g_slc has dtype torch.int64, but must be a floating dtype'),
        ({'g_swa': ones(1, 6, 4, device='meta')}, r'g_swa is on meta, but the branches are on cpu'),
        ({'q': normal(1, 6, 3, 4)}, r'q has 3 heads, but must have a multiple of the 2 heads of k'),
        ({'v': normal(1, 5, 2, 4)}, r'v has shape \(1, 5, 2, 4\), but must be \(1, 6, 2\) \+ \(DV,\) to match k'),
        ({'block_size': 0}, r'block_size is 0, but must be an integer of at least 1'),
        ({'window_size': -1}, r'window_size is -1, but must be an integer of at least 0'),
        ({'window_size': 2.0}, r'window_size is 2.0, but must be an integer of at least 0'),
        ({'block_counts': None}, r'block_counts is None, but must be an integer of at least 0'),
        ({'block_counts': -1}, r'block_counts is -1, but must be an integer of at least 0'),
        ({'block_counts': ones(1, 6, 2)}, r'block_counts has dtype torch.float32, but must be int32 or int64'),
        ({'block_counts': ones(1, 6, 4).int()}, r'block_counts has shape \(1, 6, 4\), but must have \(1, 6, 2\)'),
        ({'block_counts': ones(1, 6, 2).int().to('meta')}, r'block_counts is on meta, but q is on cpu'),
        ({'block_indices': ones(1, 6, 2, 3)}, r'block_indices has dtype torch.float32, but must be int32 or int64'),
        ({'block_indices': ones(1, 6, 3, 3).int()}, r'block_indices has shape \(1, 6, 3, 3\), but must have'),
        ({'block_indices': ones(6).int()}, r'block_indices has shape \(6,\), but must have'),
        ({'cu_seqlens': [0, 6]}, r'cu_seqlens is a list, but must be a tensor or a pair of tensors'),
        ({'cu_seqlens': (cumulative([6]),)}, r'cu_seqlens is a tuple, but must be a tensor or a pair of tensors'),
        ({'cu_seqlens': cumulative([7])}, r'cu_seqlens ends at 7, but there are 6 tokens'),
        ({'cu_seqlens': (cumulative([6]), cumulative([3, 3]))}, r'cu_seqlens_k has 3 entries, but must have 2'),
        ({'backend': 'cuda'}, r"backend is 'cuda', but must be one of"),
    ],
)
def test_wrong_packing(arguments: dict[str, Any], message: str):
    problem = make_problem([(6, 6)], packed=False)
    with pytest.raises(ValueError, match=message) as error:
        parallel_nsa(**{**problem.inputs, **problem.settings, **arguments})
    assert '\n' not in str(error.value)


@pytest.mark.gpu
def test_counts_of_a_graph_that_is_captured():
    problem = make_problem([(6, 6)], packed=False, counts=None)
    inputs = {name: t.cuda().float() for name, t in problem.inputs.items()}
    settings: dict[str, Any] = {**problem.settings, 'block_counts': problem.settings['block_counts'].cuda()}
    with torch.cuda.graph(torch.cuda.CUDAGraph()):
        with pytest.raises(ValueError, match=r'block_counts is a tensor while .*: give an int, or block_indices'):
            parallel_nsa(**inputs, **settings)
        inputs['q'].add_(1)
