"""Replayed calls of `nsa`. Kernels of the interpreter stand in for compiled ones: they get addresses and numbers."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.autograd.graph import save_on_cpu
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint
from triton import knobs

from native_sparse_attention import SparseAttention
from native_sparse_attention.autograd import replay
from native_sparse_attention.ops._triton import launch as launches
from native_sparse_attention.ops._triton.support import is_interpreted
from tests.support.replay_kernels import play
from tests.support.replay_problems import SIZES, SMALL, Problem, assert_same, programs, without_replay

pytestmark = [
    pytest.mark.skipif(not is_interpreted(), reason='a GPU has compiled kernels'),
    pytest.mark.plain_memory(watched=False),
]

CPU = torch.device('cpu')


@pytest.fixture(autouse=True)
def runs(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    yield from play(monkeypatch)


PROBLEMS = {
    'separate': Problem(batch=2),
    'merged': Problem('gate', heads=3, kv_heads=3),
    'output gate': Problem('output gate'),
    'scores': Problem('scores', heads=4, memory=True),
    'packed': Problem(lengths=(17, 0, 23), memory=True),
    'packed, merged': Problem('gate', lengths=(17, 23)),
    'padded': Problem(batch=2, padded=True),
    'features': Problem(features=True, memory=True),
    'features, merged': Problem('gate', features=True),
    'float16': Problem(dtype=torch.float16),
    'differentiable': Problem(settings={'use_diff_topk': True}),
    'own blocks': Problem(settings={'share_group': False, 'num_init': 0}),
    'window alone': Problem(sizes={**SIZES, 'num_selected': 0}),
    'not causal': Problem(sizes={**SIZES, 'window_size': (5, 5)}, settings={'causal': False}),
}


def check(problem: Problem, runs: list[str], *, seeds: tuple[int, ...] = (0, 1), replays: bool = True) -> None:
    """Check the bits of calls without replay; replayed calls repeat their launches in order."""
    for seed in seeds:
        with without_replay():
            expected = problem.results(problem.make(CPU, seed))
        before = len(runs)
        assert_same(problem.results(problem.make(CPU, seed)), expected)
        assert (len(runs) > before) == replays


@pytest.mark.quick
@pytest.mark.parametrize('name', PROBLEMS)
def test_bits(name: str, runs: list[str]) -> None:
    check(PROBLEMS[name], runs)
    assert len(programs()) == 1


def test_launches_in_their_order(runs: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    names: list[str] = []
    monkeypatch.setattr(launches, 'recorders', [lambda known, grid, args: names.append(known.kernel.fn.__name__)])
    with without_replay():
        SMALL.results(SMALL.make(CPU))
    monkeypatch.setattr(launches, 'recorders', [])
    SMALL.results(SMALL.make(CPU))
    assert runs == names


def test_other_sizes_between(runs: list[str]) -> None:
    for problem in (SMALL, SMALL._replace(seqlen=21), SMALL, SMALL._replace(merged='gate'), SMALL):
        check(problem, runs, seeds=(3,))
    assert len(programs()) == 3


@pytest.mark.parametrize('needs', [(), ('q',), ('k', 'gates'), ('k_cmp',), ('v',)], ids=str)
@pytest.mark.parametrize('merged', [None, 'scores'])
def test_gradients_of_some(needs: tuple[str, ...], merged: str | None, runs: list[str]) -> None:
    """A call without gradients returns an output without a graph, as without replay."""
    problem = SMALL._replace(needs=needs, merged=merged, sizes=SIZES if merged else SMALL.sizes)
    check(problem, runs)
    with without_replay():
        expected = problem.call(problem.make(CPU)).requires_grad
    assert problem.call(problem.make(CPU)).requires_grad == expected


def test_calls_are_counted(runs: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(replay, 'MIN_CALLS', 3)
    for count in range(1, 4):
        SMALL.call(SMALL.make(CPU))
        assert bool(programs()) == (count == 3)
    assert not torch.is_grad_enabled() or SMALL.call(SMALL.make(CPU)).requires_grad


def test_few_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(replay, 'MAX_CALLS', 3)
    monkeypatch.setattr(replay, 'MIN_CALLS', 2)
    for seqlen in range(9, 14):
        problem = SMALL._replace(seqlen=seqlen, needs=())
        older = [*replay._calls]
        problem.call(problem.make(CPU))
        assert [*replay._calls][:-1] == older[-2:]


# --- Autograd ---


@pytest.mark.parametrize('name', PROBLEMS)
def test_a_graph_that_is_kept(name: str, runs: list[str]) -> None:
    """Two calls of one program run before their backward passes, one of which runs twice."""
    problem, calls = PROBLEMS[name], []
    with without_replay():
        expected = [problem.results(problem.make(CPU, seed))[1:] for seed in (0, 1)]
    for seed in (0, 1):
        tensors = problem.make(CPU, seed)
        calls.append((problem.call(tensors), [t for t in tensors.values() if t.requires_grad]))
    assert runs
    dout = torch.randn(calls[0][0].shape, generator=torch.Generator().manual_seed(7)).to(calls[0][0])
    for index, is_kept in ((0, True), (1, False), (0, False)):
        out, leaves = calls[index]
        grads = torch.autograd.grad(out, leaves, dout, retain_graph=is_kept, allow_unused=True)
        assert_same([*grads], expected[index])
    with pytest.raises(RuntimeError, match='backward through the graph a second time'):
        calls[0][0].backward(dout)


def test_no_second_derivative(runs: list[str]) -> None:
    tensors = SMALL.make(CPU)
    out = SMALL.call(tensors)
    assert programs()
    grads = torch.autograd.grad(out.sum(), [tensors['q'], tensors['k']], create_graph=True)
    assert all(grad.requires_grad for grad in grads)
    with pytest.raises(RuntimeError, match=r'native_sparse_attention::.* has no second derivative'):
        torch.autograd.grad(grads[0].sum(), tensors['k'])


@pytest.mark.parametrize('kind', ['expanded', 'strided', 'misaligned', 'own output'])
def test_other_gradients_of_the_output(kind: str, runs: list[str]) -> None:
    def results() -> list[Tensor | None]:
        tensors = SMALL.make(CPU)
        out = SMALL.call(tensors)
        dout = {
            'expanded': lambda: torch.ones(()).expand(out.shape),
            'strided': lambda: torch.ones_like(out.transpose(1, 2).contiguous()).transpose(1, 2),
            'misaligned': lambda: torch.ones(out.numel() + 1)[1:].view(out.shape),
            'own output': lambda: out.detach(),
        }[kind]()
        leaves = [t for t in tensors.values() if t.requires_grad]
        return [out.detach(), *torch.autograd.grad(out, leaves, dout)]

    with without_replay():
        expected = results()
    for _ in range(2):
        assert_same(results(), expected)
    assert programs()


def test_changed_saved_rotations_are_detected(runs: list[str]) -> None:
    tensors = SMALL.make(CPU)
    out = SMALL.call(tensors)
    tensors['q'].detach().mul_(2)
    with pytest.raises(RuntimeError, match='modified by an inplace operation'):
        out.sum().backward()


def test_an_unused_output(runs: list[str]) -> None:
    tensors = SMALL.make(CPU)
    out, x = SMALL.call(tensors), torch.ones((), requires_grad=True)
    (grad,) = torch.autograd.grad(
        x * 2 + out.detach().sum() * 0, tensors['q'], allow_unused=True, materialize_grads=False
    )
    assert grad is None


@pytest.mark.parametrize('reentrant', [True, False])
def test_checkpoints(reentrant: bool, runs: list[str]) -> None:
    """The hooks of a checkpoint count saved tensors; its recomputed call is computed as its first one."""

    def results() -> list[Tensor | None]:
        tensors = SMALL.make(CPU)
        leaves = [*tensors.values()]

        def call(*values: Tensor) -> Tensor:
            return SMALL.call(dict(zip(tensors, values, strict=True)))

        out = checkpoint(call, *leaves, use_reentrant=reentrant)
        assert isinstance(out, Tensor)
        out.sum().backward()
        return [out.detach(), *(t.grad for t in leaves)]

    with without_replay():
        expected = results()
    for _ in range(2):
        assert_same(results(), expected)
    assert bool(programs()) == reentrant


def test_other_hooks_of_saved_tensors(runs: list[str]) -> None:
    with save_on_cpu():
        check(SMALL, runs, replays=False)


def test_a_layer(runs: list[str]) -> None:
    """The hooks of a layer, which save queries without rotary embedding, take part."""
    torch.manual_seed(0)
    layer = SparseAttention(32, 16, 2, 8, 8, 4, 8, 3, kv_heads=1, causal=True, backend='triton')
    x = torch.randn(1, 30, 32)

    def results() -> list[Tensor | None]:
        leaf = x.clone().requires_grad_()
        out = layer(leaf)
        return [out.detach(), *torch.autograd.grad(out.square().sum(), [leaf, *layer.parameters()], allow_unused=True)]

    with without_replay():
        expected = results()
    for _ in range(2):
        assert_same(results(), expected)
    assert len(programs()) == 1
    with torch.no_grad(), without_replay():
        out = layer(x)
    with torch.no_grad():
        assert_same([layer(x)], [out])
    assert len(programs()) == 2


# --- Inputs ---


def strided(tensors: dict[str, Tensor], kind: str) -> dict[str, Tensor]:
    def change(t: Tensor) -> Tensor:
        match kind:
            case 'transposed':
                made = t.detach().transpose(1, 2).contiguous().transpose(1, 2)
            case 'misaligned':
                made = torch.cat((t.new_zeros(1), t.detach().flatten()))[1:].view(t.shape)
            case _:
                made = t.detach()[..., :1].expand(t.shape)
        return made.requires_grad_(t.requires_grad)

    return {name: change(t) if name in 'qkv' else t for name, t in tensors.items()}


@pytest.mark.parametrize('kind', ['transposed', 'misaligned', 'expanded'])
def test_layouts(kind: str, runs: list[str]) -> None:
    """Each layout of the inputs has a program."""
    for change in (True, False, True):
        tensors = SMALL.make(CPU)
        tensors = strided(tensors, kind) if change else tensors
        with without_replay():
            expected = SMALL.results(tensors)
        assert_same(SMALL.results(tensors), expected)
    assert len(programs()) == 2


def test_slices_of_one_projection(runs: list[str]) -> None:
    """Inputs are in one storage, at a distance that differs from call to call."""
    for gap in (0, 2, 1):
        tensors = SMALL.make(CPU)
        width = SMALL.heads + 2 + gap
        qkv = torch.randn(1, SMALL.seqlen, 6, SMALL.head_dim)
        assert width <= 6
        tensors |= {'q': qkv[:, :, :2], 'k': qkv[:, :, 2 + gap : 3 + gap], 'v': qkv[:, :, 3 + gap : 4 + gap]}
        tensors = {name: t.detach().requires_grad_() for name, t in tensors.items()}
        with without_replay():
            expected = SMALL.results(tensors)
        assert_same(SMALL.results(tensors), expected)
    assert len(programs()) == 1


def test_one_tensor_for_several(runs: list[str]) -> None:
    """The sum of two gradients does not depend on their order; that of three does, so such calls are not replayed."""
    for names, count in ((('q_cmp',), 1), (('q_cmp', 'q_window'), 1), (('k_window', 'v_window'), 2)):
        tensors = SMALL.make(CPU)
        source = {'q': tensors['q'], 'k': tensors['k'], 'v': tensors['v']}
        tensors |= {name: source[name[0]] for name in names}
        leaves = [*{id(t): t for t in tensors.values()}.values()]
        with without_replay():
            expected = torch.autograd.grad(SMALL.call(tensors).sum(), leaves)
        for _ in range(2):
            assert_same([*torch.autograd.grad(SMALL.call(tensors).sum(), leaves)], [*expected])
        assert len(programs()) == count


def test_parameters_and_pairs(runs: list[str]) -> None:
    tensors = SMALL.make(CPU)
    with without_replay():
        expected = SMALL.results(tensors)
    assert_same(SMALL.results({name: nn.Parameter(t.detach()) for name, t in tensors.items()}), expected)
    assert programs()


def test_errors_are_those_of_the_call(runs: list[str]) -> None:
    tensors = SMALL.make(CPU)
    for _ in range(2):
        with pytest.raises(ValueError, match='v has shape'):
            SMALL.call({**tensors, 'v': tensors['v'][:, 1:]})
        with pytest.raises(ValueError, match='scale is nan'):
            SMALL._replace(settings={'scale': float('nan')}).call(tensors)
    assert not programs()


def test_settings_of_other_types(runs: list[str]) -> None:
    """1, 1.0 and True are equal but distinct settings."""
    tensors = SMALL.make(CPU)
    SMALL._replace(settings={'scale': 1}).call(tensors)
    SMALL._replace(settings={'scale': 1.0}).call(tensors)
    with pytest.raises(ValueError, match='scale is True'):
        SMALL._replace(settings={'scale': True}).call(tensors)
    assert len(programs()) == 2


# --- Modes, hooks and transforms that observe a call ---


class Subclass(Tensor):
    pass


class Mode(TorchDispatchMode):
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


def no_replay(case: str) -> Any:
    contexts: dict[str, Any] = {
        'dispatch mode': Mode,
        'function mode': lambda: torch.device('cpu'),
        'forward mode': forward_ad.dual_level,
    }
    return contexts.get(case, nullcontext)()


@pytest.mark.parametrize(
    'case', ['dispatch mode', 'function mode', 'subclass', 'dropout', 'custom selection', 'too large', 'profiler']
)
def test_calls_that_are_not_replayed(case: str, runs: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    SMALL.call(SMALL.make(CPU))
    recorded, problem, tensors = programs(), SMALL, SMALL.make(CPU)
    runs.clear()
    match case:
        case 'subclass':
            tensors['k'] = tensors['k'].detach().as_subclass(Subclass)
        case 'dropout':
            problem = SMALL._replace(settings={'dropout_p': 0.5, 'dropout_seed': 3})
        case 'custom selection':
            problem = SMALL._replace(settings={'choose': lambda *args, **kwargs: None})
        case 'too large':
            monkeypatch.setattr(replay, 'MAX_ELEMENTS', 1)
        case 'profiler':
            monkeypatch.setattr(knobs.runtime, 'launch_enter_hook', lambda _: None)
    with no_replay(case):
        problem.call(tensors)
    assert not runs
    assert programs() == recorded


def test_transforms(runs: list[str]) -> None:
    SMALL.call(SMALL.make(CPU))
    runs.clear()
    tensors = SMALL._replace(needs=()).make(CPU)
    eager = SMALL._replace(settings={'backend': 'auto'})
    for name in ('q', 'v'):
        torch.func.grad(lambda t: eager.call({**tensors, name: t}).sum())(tensors[name])  # noqa: B023
    with forward_ad.dual_level():
        eager.call({**tensors, 'q': forward_ad.make_dual(tensors['q'], tensors['q'])})
    assert not runs
    assert len(programs()) == 1


def test_flags_have_programs_of_their_own(runs: list[str]) -> None:
    problem = SMALL._replace(needs=())
    contexts: list[Any] = [nullcontext, torch.no_grad, torch.inference_mode, lambda: torch.autocast('cpu')]
    for number, context in enumerate(contexts, 1):
        with without_replay(), context():
            expected = problem.results(problem.make(CPU))
        with context():
            assert_same(problem.results(problem.make(CPU)), expected)
        assert len(programs()) == number
    torch.use_deterministic_algorithms(True)
    try:
        check(problem, runs)
    finally:
        torch.use_deterministic_algorithms(False)
    torch.set_default_dtype(torch.float64)
    try:
        check(problem, runs)
    finally:
        torch.set_default_dtype(torch.float32)
    assert len(programs()) == len(contexts) + 2


def test_threads(runs: list[str]) -> None:
    """Two threads record and replay at the same time, without recording operations of each other."""
    problems = [SMALL, SMALL._replace(merged='gate')]
    with without_replay():
        expected = [problem.results(problem.make(CPU)) for problem in problems]
    found: list[Any] = [None, None]

    def work(index: int) -> None:
        for _ in range(3):
            found[index] = problems[index].results(problems[index].make(CPU))

    threads = [threading.Thread(target=work, args=(index,)) for index in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for results, others in zip(found, expected, strict=True):
        assert_same(results, others)
    assert len(programs()) == 2


def test_no_tensor_is_kept(runs: list[str]) -> None:
    """A program holds no tensors, and a call releases its saved tensors with its graph."""
    SMALL.results(SMALL.make(CPU))
    (program,) = programs()
    held = [value for f in (program.forward, program.backward) for value in f.__globals__.values()]
    assert not any(isinstance(value, Tensor) for value in held)


def test_pytorch_of_other_makings(runs: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(replay, '_recording', None)
    check(SMALL, runs, replays=False)
    assert not replay._calls
