"""The benchmark of a training step by part: every kernel and op belongs to a part of the model."""

from __future__ import annotations

import argparse
import ast
import json
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile, record_function

from benchmarks import kernel_parts, runner, step_parts
from benchmarks.kernel_parts import NODE, NOT_ASSIGNED, RANGE, Steps, Time
from benchmarks.training_speed import make_run
from native_sparse_attention.nn.attention import SparseAttention
from tests.tools.test_import import FILES

KERNEL = 'kernel '
TINY = ['--depth', '1', '--dim', '32', '--heads', '2', '--dim-head', '16']
TINY_SPARSE = ['--sliding-window-size', '16', '--compress-block-size', '8', '--compress-block-sliding-stride', '4']
TINY_SPARSE += ['--selection-block-size', '8', '--num-selected-blocks', '4']


def make_cases(flags: list[str], **options: Any) -> list[runner.Case]:
    given = {'lengths': '64', 'variants': 'long,dense', 'kv_heads': '1', 'steps': 1, 'tokens': 64}
    given |= {'device': 'cpu', 'data': 'stdlib', 'flags': flags, **options}
    return step_parts.make_cases(argparse.Namespace(**given))


@pytest.fixture
def data(tmp_path: Path) -> str:
    (tmp_path / 'text').write_bytes(bytes(range(256)) * 20)
    return str(tmp_path / 'text')


# --- Kernels of real steps, in Triton's interpreter ---


@pytest.mark.skipif(torch.cuda.is_available(), reason='tests/gpu/test_step_parts.py profiles real kernels')
@pytest.mark.parametrize(
    ('variant', 'flags', 'expected'),
    [
        (
            'long',
            [],
            {
                ('forward_kernel', kernel_parts.COMPRESSED, False),
                ('dq_kernel', kernel_parts.COMPRESSED, True),
                ('dkv_kernel', kernel_parts.COMPRESSED, True),
                ('select_kernel', kernel_parts.SELECTION, False),
                ('dq_kernel', kernel_parts.TOP_K_GRADIENT, True),
                ('dscale_kernel', kernel_parts.TOP_K_GRADIENT, True),
                ('forward_kernel', kernel_parts.MERGED, False),
                ('dq_kernel', kernel_parts.MERGED, True),
                ('dkv_kernel', kernel_parts.MERGED, True),
                ('forward_kernel', kernel_parts.GATED_SUM, False),
                ('backward_kernel', kernel_parts.GATED_SUM, True),
                ('norm_rotary_kernel', kernel_parts.NORMS, False),
                ('norm_rotary_backward_kernel', kernel_parts.NORMS, True),
                ('mass_kernel', kernel_parts.BLOCK_LOSS, False),
                ('dq_kernel', kernel_parts.BLOCK_LOSS, True),
                ('dk_kernel', kernel_parts.BLOCK_LOSS, True),
            },
        ),
        (
            'separate',
            ['--no-use-diff-topk', '--no-qk-norm', '--block-loss', '0'],
            {
                ('forward_kernel', kernel_parts.COMPRESSED, False),
                ('dkv_kernel', kernel_parts.COMPRESSED, True),
                ('select_kernel', kernel_parts.SELECTION, False),
                ('dkv_kernel', kernel_parts.SELECTED, True),
                ('forward_kernel', kernel_parts.WINDOW, False),
                ('dq_kernel', kernel_parts.WINDOW, True),
                ('dkv_kernel', kernel_parts.WINDOW, True),
                ('rotary_kernel', kernel_parts.NORMS, False),
                ('sum_kernel', kernel_parts.NORMS, True),
            },
        ),
    ],
)
def test_kernels_of_a_step_are_assigned(
    variant: str, flags: list[str], expected: set[tuple[str, str, bool]], data: str
) -> None:
    pytest.importorskip('triton')
    (case,) = make_cases([*TINY, *TINY_SPARSE, *flags], variants=variant, data=data)
    trainer = make_run(case, backend='triton')
    with kernel_parts.marked(trainer.model), named_kernels(), profile(activities=[ProfilerActivity.CPU]) as profiler:
        trainer.train_step()
    steps = Steps(profiler.events() or ())
    launches = [event for event in steps.events if event.name.startswith(KERNEL)]

    def assigned() -> set[tuple[str, str, bool]]:
        return {steps.assign(event.name.removeprefix(KERNEL), event, 1.0)[:3] for event in launches}

    found = assigned()
    assert expected <= found
    assert NOT_ASSIGNED not in {part for _, part, _ in found}
    # Ranges and sequence numbers alone give the same parts, except for rotary in the backward pass of the attention.
    with mock.patch.dict(kernel_parts.OPS, clear=True), mock.patch.dict(kernel_parts.KERNELS, clear=True):
        by_ranges = assigned()
    assert {name for name, _, _ in by_ranges ^ found} <= {'rotary_kernel', 'norm_rotary_kernel', 'dscale_kernel'}


def named_kernels() -> Any:
    """Run every kernel inside an event of its name."""
    from triton.runtime.interpreter import InterpretedFunction

    interpret = InterpretedFunction.run

    def run(self: Any, *args: Any, **settings: Any) -> Any:
        with record_function(KERNEL + self.fn.__name__):
            return interpret(self, *args, **settings)

    return mock.patch.object(InterpretedFunction, 'run', run)


def test_marked_changes_no_loss(data: str) -> None:
    (case,) = make_cases([*TINY, *TINY_SPARSE], variants='long', data=data)
    losses = []
    for is_marked in (False, True):
        trainer = make_run(case)
        if is_marked:
            with kernel_parts.marked(trainer.model):
                assert '_project' in vars(SparseAttention)
                trainer.train_step()
        else:
            trainer.train_step()
        losses.append(trainer.recent)
    assert losses[0] == losses[1]
    assert 'forward' not in vars(trainer.model.norm)


# --- The tables of names ---


def jit_functions() -> Iterator[str]:
    """Return the names of the kernels of the package, which end in _kernel, except those of decoding."""
    for file in FILES:
        functions = ast.walk(ast.parse(file.read_text('utf-8'))) if 'decoding' not in file.parts else ()
        for node in functions:
            if isinstance(node, ast.FunctionDef) and node.name.endswith('_kernel'):
                assert any('jit' in ast.unparse(decorator) for decorator in node.decorator_list)
                yield node.name


def test_every_kernel_is_known() -> None:
    assert {*jit_functions()} == kernel_parts.KERNELS.keys()


def test_every_launched_kernel_has_such_a_name() -> None:
    for file in FILES:
        for node in ast.walk(ast.parse(file.read_text('utf-8'))):
            if isinstance(node, ast.Call) and ast.unparse(node.func) in ('launch', 'launch_rows'):
                kernel = ast.unparse(node.args[0])
                assert kernel.endswith('kernel'), f'{file}: launches {kernel}'


def test_every_op_is_known() -> None:
    text = '\n'.join(file.read_text('utf-8') for file in FILES)
    names = re.findall(r"(?:register_op\(\s*'|custom_op\('native_sparse_attention::)(\w+)'", text)
    own = {name for name in kernel_parts.OPS if name.startswith('native_sparse_attention::')}
    assert {f'native_sparse_attention::{name}' for name in names} == own


def test_parts_of_the_tables_are_in_the_report() -> None:
    parts = {part for _, _, part in kernel_parts.RANGES}
    parts |= {part for table in (kernel_parts.OPS, kernel_parts.KERNELS) for part in table.values() if part}
    assert parts <= {*kernel_parts.PARTS}


# --- Events of a GPU ---


def event(name: str, parent: Any = None, start: float = 0.0, seq: int = -1, kernels: Any = (), **rest: Any) -> Any:
    """Return an event of the profiler on the CPU. kernels: (name, microseconds)."""
    launched = [SimpleNamespace(name=kernel, duration=micros) for kernel, micros in kernels]
    values = {'device_type': DeviceType.CPU, 'cpu_parent': parent, 'sequence_nr': seq, 'kernels': launched}
    return SimpleNamespace(name=name, **{**values, 'time_range': SimpleNamespace(start=start), **rest})


def on_gpu(name: str, micros: float, **rest: Any) -> Any:
    time_range = SimpleNamespace(elapsed_us=lambda: micros)
    return SimpleNamespace(name=name, device_type=DeviceType.CUDA, time_range=time_range, **rest)


def test_backward_belongs_to_the_op_that_made_the_node() -> None:
    earlier = event(RANGE + 'φ')
    later = event(RANGE + 'gates')
    made = [
        event('aten::empty', earlier, start=1, seq=7),  # makes no node
        event('aten::linear', later, start=2, seq=7),
        event('aten::mm', later, start=3, kernels=[('gemm', 5.0)]),
    ]
    node = event(NODE + 'MmBackward0', event(RANGE + 'φ'), start=4, seq=7)
    inner = event('aten::mm', event('MmBackward0', node, seq=7), start=5, kernels=[('gemm', 6.0), ('gemm', 1.0)])
    steps = Steps([earlier, later, *made, node, inner])
    gates = kernel_parts.GATES
    forward, *backward = steps.device_times()
    assert forward == Time('gemm', gates, False, 5.0)
    assert backward == [Time('gemm', gates, True, 6.0), Time('gemm', gates, True, 1.0)]


def test_an_unknown_kernel_is_not_assigned() -> None:
    outside = event('aten::add', kernels=[('unheard_of', 2.0), ('select_kernel', 3.0)])
    orphan = event('aten::add', event(NODE + 'AddBackward0', seq=99), kernels=[('lost', 4.0)])
    events = [outside, orphan, on_gpu('unheard_of', 2.0), on_gpu('select_kernel', 3.0), on_gpu('lost', 4.0)]
    events += [on_gpu('unlinked', 5.0), on_gpu('rotary_kernel', 6.0)]
    assert Steps(events).device_times() == [
        Time('unheard_of', NOT_ASSIGNED, False, 2.0),
        Time('select_kernel', kernel_parts.SELECTION, False, 3.0),
        Time('lost', NOT_ASSIGNED, True, 4.0),
        Time('unlinked', NOT_ASSIGNED, False, 5.0),
        Time('rotary_kernel', kernel_parts.NORMS, False, 6.0),
    ]


def test_nothing_counts_twice() -> None:
    phi = event(RANGE + 'φ', kernels=[(RANGE + 'φ', 9.0)])
    op = event('aten::mm', phi, kernels=[('gemm', 2.0)])
    call = event('cudaLaunchKernel', op, kernels=[('gemm', 2.0)])
    events = [
        phi,
        op,
        call,
        on_gpu('gemm', 2.0),
        on_gpu(RANGE + 'φ', 9.0),
        on_gpu('note', 9.0, is_user_annotation=True),
    ]
    assert Steps(events).device_times() == [Time('gemm', 'φ', False, 2.0)]


# --- The script ---


def test_script(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, data: str) -> None:
    class Worker:
        """A worker in this process that measures shortly."""

        def __init__(self, environment: Any) -> None:
            self.alive = True

        def measure(self, case: runner.Case, seconds: float) -> runner.Case:
            call, leaves = step_parts.make_call(case)
            return runner.measure_itself(call, leaves, 'cpu', 0.01, True)

        def stop(self) -> None: ...

    monkeypatch.setattr(runner, 'Worker', Worker)
    flags = ['--device', 'cpu', '--commit', 'abc', '--data', data, '--out', str(tmp_path), '--lengths', '48']
    flags += ['--variants', 'cpu,cpu-dense', '--kv-heads', '2,1', '--tokens', '96', '--steps', '1']
    monkeypatch.setattr(sys, 'argv', ['step_parts', *flags, '--', '--dim', '32', '--block-loss', '0.1'])
    step_parts.main()
    (text,) = tmp_path.glob('cpu/step-parts.md')
    rows = json.loads(text.with_suffix('.json').read_text())['rows']
    assert [(case['shape'], case['backend']) for case in rows] == [
        ('2 x 48 tokens, 2/2 heads of 32', 'cpu'), ('2 x 48 tokens, 2/2 heads of 32', 'cpu-dense'),
        ('2 x 48 tokens, 2/1 heads of 32', 'cpu'), ('2 x 48 tokens, 2/1 heads of 32', 'cpu-dense'),
    ]  # fmt: skip
    absent = {kernel_parts.MERGED, NOT_ASSIGNED}
    sparse, dense = ({part for part, ms in row['parts'].items() if sum(ms) > 0} for row in rows[:2])
    assert sparse == {*kernel_parts.PARTS} - absent - {kernel_parts.DENSE}
    assert dense == {
        kernel_parts.HEAD, kernel_parts.FEED_FORWARD, kernel_parts.PROJECTIONS, kernel_parts.NORMS, kernel_parts.DENSE,
        kernel_parts.OTHER, kernel_parts.OPTIMIZER, kernel_parts.BATCH,
    }  # fmt: skip
    for row in rows:
        backward = {part for part, (_, ms) in row['parts'].items() if ms > 0}
        assert kernel_parts.FEED_FORWARD in backward
        assert not backward & {kernel_parts.SELECTION, kernel_parts.OPTIMIZER}
    assert '| not assigned | – |' in text.read_text()
    assert text.with_suffix('.png').exists()


def row(variant: str, ms: float, parts: dict[str, list[float]], **rest: Any) -> runner.Case:
    (case,) = make_cases([], variants=variant, kv_heads=None)
    kernels = [['forward_kernel', kernel_parts.WINDOW, False, 2.0, 6.0], ['a|b', NOT_ASSIGNED, True, 0.5, 1.0]]
    found = {'parts': parts, 'forward_ms': ms, 'kernels': kernels, 'replayed': True, 'attention': None}
    return {**case, **found, **rest}


def test_report() -> None:
    parts = {kernel_parts.WINDOW: [2.0, 3.5], kernel_parts.OPTIMIZER: [1.0, 0.0], NOT_ASSIGNED: [0.0, 0.5]}
    rows = [row('long', 10.0, parts, launched_ms=20.0), row('dense', 8.0, {kernel_parts.DENSE: [1.0, 3.0]})]
    text = '\n'.join(step_parts.make_tables(rows))
    assert '| window attention | 2 | 3.5 | 5.5 | 78.6 | – | – | – | – | 5.5 |' in text
    assert '| clipping, optimizer | – | – | 1 | 14.3 | – | – | – | – | 1 |' in text
    assert '| not assigned | – | 0.5 | 0.5 | 7.14 | – | – | – | – | 0.5 |' in text
    assert '| **sum of the parts** | – | – | 7 | 100 | – | – | 4 | 100 | 3 |' in text
    assert '| **whole step** | – | – | 10 | 143 | – | – | 8 | 200 | 2 |' in text
    assert '| **whole step, launched one by one** | – | – | 20 | 286 | – | – | – | – | – |' in text
    assert 'long, not assigned: `a/b` 0.5 ms' in text
    assert '| long | `forward_kernel` | window attention | forward | 2 | 6 |' in text
    failed = {**make_cases([], variants='long', kv_heads=None)[0], 'note': 'stopped after 150 s'}
    assert 'long: stopped after 150 s.' in '\n'.join(step_parts.make_tables([failed]))


@pytest.mark.parametrize(
    ('options', 'flags', 'message'),
    [
        ({'variants': 'long,wide'}, [], "--variants long,wide: 'wide' must be one of"),
        ({'variants': 'long,long'}, [], '--variants long,long: every entry must stand once'),
        ({'lengths': '64,0'}, [], "--lengths 64,0: '0' must be a positive number"),
        ({'lengths': '48'}, [], '--tokens 64: must be a multiple of every length'),
        ({'steps': 0}, [], '--steps 0: must be at least 1'),
        ({'kv_heads': '3'}, [], '--kv-heads 3: must be divisors of 8, the query heads'),
        ({}, ['--seq-len', '128'], '--seq-len 128: must not be given after --; --lengths decides it'),
        ({}, ['--kv-heads', '1'], '--kv-heads 1: must not be given after --; --kv-heads decides it'),
        ({}, ['--preset', 'base'], '--preset base: must not be given after --, where it does not act here'),
        ({}, ['--compile'], '--compile True: must not be given after --, where it does not act here'),
        ({'variants': 'separate'}, ['--merge-window'], '--merge-window: must not be given after --; variant separate'),
        ({'variants': 'dense'}, ['--block-loss', '0'], '--block-loss 0.0: must be left out with --attention dense'),
    ],
)
def test_contradictory_flags(options: dict[str, Any], flags: list[str], message: str) -> None:
    with pytest.raises(step_parts.UserError) as error:
        make_cases(flags, **options)
    assert str(error.value).startswith(message)
    assert '\n' not in str(error.value)


def test_flags_reach_every_case() -> None:
    cases = make_cases(['--block-loss', '0', '--no-graph'], kv_heads='4,1', lengths='64,32')
    assert [case['config']['kv_heads'] for case in cases] == [4, 4, 1, 1] * 2
    assert [case['config']['attention'] for case in cases] == ['sparse', 'dense'] * 4
    assert {(case['config']['block_loss'], case['graph']) for case in cases} == {(0.0, False)}
