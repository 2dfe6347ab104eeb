"""The benchmark of retrieval: its problems, and runs of two variants with resume and report."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from torch import Tensor

from benchmarks import learning_variants, retrieval, retrieval_report, retrieval_run
from benchmarks.jobs import StopRequest
from benchmarks.retrieval_run import Config, Run
from benchmarks.retrieval_tasks import IGNORED, QUESTION, Batch, Task, is_right, make_needle, make_recall, seeded
from native_sparse_attention.nn import attention as layers

CPU = torch.device('cpu')
TASKS = [Task(64, pairs=12, queries=5), Task(32, key_tokens=2, value_tokens=3, pairs=4, queries=4)]
TINY: dict[str, Any] = {
    'lengths': (32, 64), 'first_lengths': (16,), 'dim': 16, 'depth': 1, 'heads': 2, 'kv_heads': 1, 'dim_head': 8,
    'window': 8, 'compress_block': 4, 'compress_stride': 2, 'selection_block': 4, 'num_selected': 4, 'num_tokens': 32,
    'pairs': 4, 'pair_spacing': 8, 'queries': 2, 'tokens_per_step': 128, 'steps': 12, 'stage_steps': 4,
    'check_every': 2, 'depths': 3, 'eval_samples': 3, 'factors': (1, 2),
}  # fmt: skip
MACHINE = {'gpu': 'cpu', 'date': '2026-01-01', 'commit': 'abc', 'commands': ['python -m benchmarks.retrieval']}


def generator(*of: object) -> torch.Generator:
    return seeded(CPU, 'test', *of)


def answers(task: Task, batch: Batch) -> list[tuple[int, list[int], list[int], list[int]]]:
    """(row, text before the answer's key, key, value) of every answer, found from ids and labels alone."""
    found = []
    for row, (ids, labels) in enumerate(zip(batch.ids.tolist(), batch.labels.tolist(), strict=True)):
        at = [index for index, label in enumerate(labels) if label != IGNORED]
        assert len(at) % task.value_tokens == 0
        for first in at[:: task.value_tokens]:
            key = ids[first + 1 - task.key_tokens : first + 1]
            value = labels[first : first + task.value_tokens]
            found.append((row, ids[: first + 1 - task.key_tokens], key, value))
    return found


def places(text: list[int], part: list[int]) -> list[int]:
    return [start for start in range(len(text)) if text[start : start + len(part)] == part]


@pytest.mark.parametrize('task', TASKS)
def test_every_answer_of_recall_stands_once_in_the_text(task: Task):
    batch = make_recall(task, 6, 96, generator())
    assert batch.ids.shape == batch.labels.shape == (6, 96)
    assert int(batch.ids.min()) == QUESTION
    assert int(batch.ids.max()) < task.num_tokens
    found = answers(task, batch)
    assert len(found) == 6 * task.queries
    for _, text, key, value in found:
        body = text[: text.index(QUESTION)]
        assert len(places(body, key)) == len(places(body, key + value)) == 1
        assert all(1 <= token <= task.alphabet for token in key)
        assert all(task.alphabet < token <= 2 * task.alphabet for token in value)
        assert not places(text[len(body) :], key)  # every key is in one question
    starts = {places(text, key)[0] for _, text, key, _ in found}
    assert len(starts) > len(found) // 3  # pairs stand anywhere
    assert batch.ids[0].tolist().count(QUESTION) == 1
    keys = [token for token in batch.ids[0].tolist() if 1 <= token <= task.alphabet]
    assert len(keys) == (task.pairs + task.queries) * task.key_tokens


def test_labels_of_recall_are_the_next_tokens():
    task = TASKS[0]
    batch = make_recall(task, 4, 64, generator(), repeats=7)
    ahead, labels = batch.ids[:, 1:], batch.labels[:, :-1]
    assert torch.equal(labels[labels != IGNORED], ahead[labels != IGNORED])


def test_repeats_have_labels():
    task = TASKS[0]
    batch = make_recall(task, 8, 96, generator(), repeats=7)
    found = answers(task, batch)
    assert len(found) == 8 * (7 + task.queries)
    for _, text, key, value in found:
        assert len(places(text, key)) == len(places(text, key + value)) >= 1
    for row in range(8):  # the remaining pairs are first occurrences
        body = batch.ids[row].tolist()
        body = body[: body.index(QUESTION)]
        keys = [token for token in body if 1 <= token <= task.alphabet]
        assert (len(keys), len(set(keys))) == (12, 5)


@pytest.mark.parametrize('task', TASKS)
def test_needle_stands_at_its_depth(task: Task):
    depth = torch.tensor([0.0, 0.25, 0.5, 1.0])
    batch = make_needle(task, depth, 101, generator())
    found = answers(task, batch)
    assert [row for row, *_ in found] == [0, 1, 2, 3]
    room = 101 - 2 * task.width
    for (_, text, key, value), expected in zip(found, depth.tolist(), strict=True):
        assert places(text, key) == places(text, key + value) == [round(expected * room)]
        assert text.index(QUESTION) == len(text) - 1 == room + task.width
        assert sum(1 <= token <= 2 * task.alphabet for token in text) == task.width


def test_data_depend_on_seed_and_step_alone(tmp_path: Path):
    def draw(variant: str, seed: int, step: int) -> Tensor:
        run = Run(Config(variant, seed, **TINY), tmp_path, CPU, MACHINE, StopRequest())
        run.step = step
        return run.draw().ids

    first = draw('dense', 0, 3)
    assert torch.equal(first, draw('separate', 0, 3))
    assert not torch.equal(first, draw('dense', 0, 4))
    assert not torch.equal(first, draw('dense', 1, 3))


def test_is_right_needs_the_whole_value():
    labels = torch.tensor([[IGNORED, 1, 2, IGNORED], [3, 4, IGNORED, IGNORED]])
    likeliest = torch.tensor([[0, 1, 2, 0], [3, 0, 0, 0]])
    logits = torch.nn.functional.one_hot(likeliest, 5).float()
    assert is_right(logits, labels, value_tokens=2).tolist() == [True, False]


@pytest.mark.parametrize(
    ('changes', 'message'),
    [
        ({'lengths': (64, 32)}, r'lengths is \(64, 32\), but must be ascending'),
        ({'tokens_per_step': 100}, 'tokens_per_step is 100, but must be at least 128'),
        ({'needle_share': 1.0}, r'needle_share is 1.0, but must lie in \[0, 1\)'),
        ({'steps': 0}, 'steps is 0, but must be at least 1'),
        ({'pair_spacing': 2}, 'length is 16, but must be at least'),
        ({'variant': 'other'}, "variant is 'other', but must be one of dense, dense-qk-norm, separate, merged, "),
    ],
)
def test_bad_settings(changes: dict[str, Any], message: str):
    settings = {'variant': 'dense', 'seed': 0, **TINY, 'pairs': 8, **changes}
    with pytest.raises(ValueError, match=message):
        Config(**settings)


def test_gates_start_as_the_variant_says():
    """The learning benchmark starts the form of the same name like this, too."""
    for variant, start in (('long', -2.0), ('long-shut', -6.0)):
        model = retrieval_run.build_model(Config(variant, 0, **TINY), CPU)
        gate = cast(Any, model.blocks[0].attention).to_strategy_combine
        assert gate.bias.view(2, 2).tolist() == [[start, 2.0]] * 2
    shape = {'dim': 16, 'depth': 1, 'heads': 2, 'kv_heads': 1, 'dim_head': 8}
    name = 'merged-dense-mass-far-output-gate-shut'
    model = learning_variants.build(name, shape, learning_variants.SPARSE, 32, seed=0)
    assert cast(Any, model.blocks[0].attention).to_strategy_combine.bias.view(2, 2).tolist() == [[-6.0, 2.0]] * 2


def test_variant_that_the_layer_does_not_know(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(retrieval_run, 'VARIANTS', {'new': retrieval_run.Variant({'no_such_option': True})})
    with pytest.raises(ValueError, match="variant is 'new', but SparseAttention has no no_such_option"):
        Config('new', 0, **TINY)


@pytest.mark.parametrize(
    ('settings', 'message'),
    [
        ({'pairs': 500}, 'pairs is 500, but must be at most 95'),
        ({'queries': 65}, 'queries is 65, but must be at most pairs, 64'),
        ({'key_tokens': 3}, 'keys, but at most 65,536 work'),
    ],
)
def test_bad_task(settings: dict[str, int], message: str):
    with pytest.raises(ValueError, match=message):
        Task(**settings)


def stages_of(config: Config, folder: Path) -> list[tuple[int, int]]:
    held = json.loads((folder / f'{config.name}.json').read_text())
    return [(stage['length'], stage['steps']) for stage in held['stages']]


def test_curriculum_moves_on_when_a_stage_is_passed_or_too_long(tmp_path: Path):
    config = Config('dense', 0, **TINY)
    run = Run(config, tmp_path, CPU, MACHINE, StopRequest())
    assert run.carry_out()
    assert stages_of(config, tmp_path) == [(16, 4), (32, 4), (64, 4)]
    assert all(stage['passed_after'] is None for stage in run.stages)
    config = Config('dense', 1, **{**TINY, 'threshold': 0.0})
    run = Run(config, tmp_path, CPU, MACHINE, StopRequest())
    assert run.carry_out()
    assert stages_of(config, tmp_path) == [(16, 2), (32, 2), (64, 8)]
    assert [stage['passed_after'] for stage in run.stages] == [2, 2, 2]


class StopAfter(StopRequest):
    """A signal that arrives at the given query for it."""

    def __init__(self, count: int) -> None:
        super().__init__()
        self.count = count

    def __bool__(self) -> bool:
        self.count -= 1
        return self.count < 0


# In training (between two checks), and in the evaluation.
@pytest.mark.parametrize(('variant', 'steps'), [('separate', 5), ('separate', 14), ('long', 5)])
def test_interrupted_run_ends_like_an_uninterrupted_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, variant: str, steps: int
):
    # The loss of the block scores draws some of the queries.
    monkeypatch.setattr(layers, 'block_score_loss', partial(layers.block_score_loss, num_queries=4))
    config, results = Config(variant, 0, **TINY), []
    for folder in (tmp_path / 'whole', tmp_path / 'parts'):
        folder.mkdir()
        if folder.name == 'parts':
            assert not Run(config, folder, CPU, MACHINE, StopAfter(steps)).carry_out()
            held = json.loads((folder / f'{config.name}.json').read_text())
            assert not held['finished']
            assert held['step'] == min(steps + 1, config.steps)
        run = Run(config, folder, CPU, MACHINE, StopRequest())
        run.restore()
        assert run.carry_out()
        result = json.loads((folder / f'{config.name}.json').read_text())
        assert result.pop('finished')
        result.pop('seconds')
        for row in result['rows']:
            row.pop('seconds')
        results.append(result)
    assert results[0] == results[1]


@pytest.mark.full
def test_script_trains_two_variants_and_reports(tmp_path: Path, capfd: pytest.CaptureFixture[str]):
    flags = ['--device', 'cpu', '--commit', 'abc', '--out', str(tmp_path), '--variants', 'dense,separate']
    for name, value in TINY.items():
        flags += ['--' + name.replace('_', '-'), ','.join(map(str, value)) if isinstance(value, tuple) else str(value)]
    assert retrieval.main(flags) == 0
    out = capfd.readouterr().out
    assert 'dense-seed0: step 12 of 12, length 64: loss' in out
    assert '| separate | 0 | > 4 | > 4 | > 4 | – | – |' in out
    (text,) = tmp_path.glob('cpu/retrieval.md')
    assert text.with_suffix('.png').stat().st_size > 10_000
    assert len(json.loads(text.with_suffix('.json').read_text())['rows']) == 2
    assert 'python -m benchmarks.retrieval' in text.read_text()

    assert retrieval.main(flags) == 0  # both runs are finished
    assert 'started' not in capfd.readouterr().out
    assert retrieval.main(['--report', str(tmp_path)]) == 0
    assert 'Accuracy of needles' in capfd.readouterr().out
    with pytest.raises(SystemExit):
        retrieval.main([*flags, '--lr', '0.5'])
    assert 'lr is 0.5, but' in capfd.readouterr().err


def test_report_compares_steps_with_the_dense_twin():
    def make_run(variant: str, passed: int | None, accuracy: float) -> dict[str, Any]:
        stages = [
            {'length': 16, 'start': 0, 'steps': 4, 'passed_after': None},
            {'length': 64, 'start': 4, 'steps': 40, 'passed_after': passed},
        ]
        needles = [
            {'task': 'needle', 'length': 64, 'depth': depth, 'accuracy': accuracy - depth / 10} for depth in (0.0, 1.0)
        ]
        recall = {'task': 'recall', 'length': 64, 'depth': None, 'accuracy': 0.625}
        config = {
            'variant': variant, 'seed': 0, 'lengths': [16, 64], 'factors': [1], 'depths': 2, 'queries': 2, 'pairs': 4,
            'threshold': 0.99, 'check_every': 2,
        }  # fmt: skip
        return {
            'config': config, 'stages': stages, 'evaluations': [recall, *needles], 'step': 44, 'seconds': 11.0,
            'parameters': 1234, 'backend': None, 'finished': True,
        }  # fmt: skip

    runs = [make_run('dense', 16, 1.0), make_run('separate', 26, 0.9), make_run('merged', None, 0.5)]
    text = '\n\n'.join(retrieval_report.tables(runs))
    assert '| dense | 0 | > 4 | 16 | 20 | 1 |' in text
    assert '| separate | 0 | > 4 | 26 | 30 | 1.5 |' in text
    assert '| merged | 0 | > 4 | > 40 | – | – |' in text
    assert '| separate | 0 | 62.5 | 80.0 | 44 | 4 | 1,234 | dense |  |' in text
    assert '| 64 | 90.0 | 80.0 |' in text
    # `long` has the norms, and so has its twin.
    runs = [make_run('dense', 16, 1.0), make_run('dense-qk-norm', 36, 1.0), make_run('long', 16, 0.9)]
    text = '\n\n'.join(retrieval_report.tables(runs))
    assert '| dense-qk-norm | 0 | > 4 | 36 | 40 | 1 |' in text
    assert '| long | 0 | > 4 | 16 | 20 | 0.5 |' in text


def test_folder_without_runs(tmp_path: Path):
    with pytest.raises(ValueError, match='must be a folder with runs'):
        retrieval_report.load(tmp_path)
