"""The learning benchmark: paired starts, resumed runs, scheduler, report."""

from __future__ import annotations

import contextlib
import gzip
import json
import lzma
from pathlib import Path
from typing import Any, cast

import pytest
import torch

from benchmarks import learning, learning_data, learning_layers, learning_report, learning_train
from benchmarks.jobs import Job
from benchmarks.learning_probes import attention_mass, gate_means, probe_layers
from benchmarks.learning_variants import SPARSE, VARIANTS, build, count, not_supported
from train_enwik8 import Config, draw

SHAPE = {'dim': 16, 'depth': 2, 'heads': 2, 'kv_heads': 1, 'dim_head': 8}
SMALL = {**SPARSE, 'compress_block_size': 8, 'compress_block_sliding_stride': 4, 'selection_block_size': 8}
SMALL |= {'sliding_window_size': 8, 'num_selected_blocks': 4}
FLAGS = (
    '--device cpu --commit abc --seq-len 32 --steps 7 --tokens-per-step 64 --dim 16 --depth 2 --heads 2 --kv-heads 1'
)
FLAGS += ' --dim-head 8 --window 8 --block 8 --compress-block 8 --compress-stride 4 --selected 4 --eval-bytes 200'
FLAGS += ' --evals 2 --probe-rows 1 --warmup 2 --threads 1'


@pytest.fixture
def text(tmp_path: Path) -> Path:
    path = tmp_path / 'text'
    path.write_bytes(bytes(range(32, 127)) * 80)
    return path


def flags(out: Path, text: Path, *more: str) -> list[str]:
    return [*FLAGS.split(), '--data', str(text), '--out', str(out), *more]


@pytest.fixture
def in_process(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Carry out jobs in this process, which saves imports; yields the names of the jobs."""
    names: list[str] = []

    def run_here(jobs: list[Job], *_: Any) -> dict[str, int | None]:
        names.extend(job.name for job in jobs)
        return {job.name: learning.main([*job.command[4:]]) for job in jobs}

    monkeypatch.setattr(learning, 'run_jobs', run_here)
    return names


def results(out: Path) -> dict[str, dict[str, Any]]:
    return {path.stem: json.loads(path.read_text()) for path in out.glob('*.json')}


def without_times(record: dict[str, Any]) -> dict[str, Any]:
    curves = {
        name: [{k: v for k, v in row.items() if k != 'seconds'} for row in record[name]] for name in ('train', 'valid')
    }
    return {k: v for k, v in record.items() if k not in ('seconds', 'tokens_per_s', 'command')} | curves


# A variant under each name, and the suffixes that every variant may have on a few.
START = [name for name in VARIANTS if not_supported(name) is None and not name.endswith(('-qk-norm', '-no-diff'))]
START += ['dense-qk-norm', 'dense-wide-qk-norm', 'separate-qk-norm', 'separate-selected-alone-qk-norm']
START += ['separate-no-diff', 'merged-all-mean-no-diff', 'merged-scores-all-qk-norm-no-diff']


@pytest.mark.filterwarnings('ignore:compressed_output is False and use_diff_topk is False')
@pytest.mark.parametrize('name', START)
def test_variants_start_from_the_weights_of_their_dense_twin(name: str):
    twin = 'dense-qk-norm' if 'qk-norm' in name else 'dense'
    dense, model = (build(each, SHAPE, SMALL, 32, seed=3) for each in (twin, name))
    theirs = dict(model.named_parameters())
    for key, parameter in dense.named_parameters():
        if theirs[key].shape == parameter.shape and not (name.startswith('dense-wide') and '.feed_forward.' in key):
            assert torch.equal(parameter, theirs[key]), key
    ids = torch.randint(256, (1, 33), generator=torch.Generator().manual_seed(0))
    loss = model(ids, return_loss=True)
    loss.backward()
    if 'selected-alone' in name or (name.startswith('merged-scores-all') and 'gate' not in name):
        torch.testing.assert_close(loss, dense(ids, return_loss=True), rtol=1e-6, atol=1e-6)
    assert all(p.grad is not None for p in model.parameters() if p.requires_grad)


def test_wide_dense_model_has_as_many_parameters_as_the_separate_form():
    sizes = [count(build(name, SHAPE, SMALL, 32, seed=0)) for name in ('dense', 'dense-wide', 'separate')]
    assert sizes[0] < sizes[1]
    assert abs(sizes[1] - sizes[2]) <= SHAPE['depth'] * (2 * SHAPE['dim'] + 1)


def test_learning_rates_and_decay_of_gates():
    def groups(name: str) -> list[tuple[int, float, float]]:
        model = build(name, SHAPE, SMALL, 32, seed=0)
        optimizer = learning_train.make_optimizer(model, Config(), VARIANTS[name])
        assert sum(len(group['params']) for group in optimizer.param_groups) == len(list(model.parameters()))
        return [(len(g['params']), g['weight_decay'], g.get('lr_scale', 1.0)) for g in optimizer.param_groups]

    plain = groups('separate')
    assert len(plain) == 2
    assert groups('separate-gate-lr10')[2:] == [(2, 0.1, 10.0), (2, 0.0, 10.0)]
    assert groups('separate-gate-no-decay')[2:] == [(2, 0.0, 1.0)]


def test_data_are_those_of_the_trainer():
    config, text = Config(seq_len=16, batch=3, grad_accum=2, seed=4), torch.arange(200, dtype=torch.uint8)
    starts = learning_train.draw_starts(len(text), config, step=5)
    assert torch.equal(text[starts + torch.arange(17)].long(), draw(text, config, 5))


@pytest.mark.filterwarnings('ignore:compressed_output is False and use_diff_topk is False')
@pytest.mark.parametrize(
    ('name', 'trains_queries'), [('merged-scores-dense-mass', True), ('merged-dense-mass-detached', False)]
)
def test_block_losses_train_the_scores(name: str, trains_queries: bool):
    model = build(name, SHAPE, SMALL, 96, seed=0)
    ids = torch.randint(256, (1, 97), generator=torch.Generator().manual_seed(0))
    loss, block_loss = model(ids, return_loss=True, return_block_loss=True)
    gradients = dict(zip(dict(model.named_parameters()), torch.autograd.grad(
        block_loss, [*model.parameters()], retain_graph=True, allow_unused=True
    ), strict=True))  # fmt: skip

    def is_trained(part: str) -> bool:
        return any(part in key and grad is not None and bool(grad.any()) for key, grad in gradients.items())

    assert is_trained('k_compress')
    assert is_trained('to_qkv') == trains_queries
    assert loss.isfinite()


def test_validations():
    assert learning_train.eval_steps(2000, 8) == [0, 62, 102, 167, 275, 451, 741, 1218, 2000]
    assert learning_train.eval_steps(3, 8) == [0, 1, 2, 3]
    nats = torch.ones(600, dtype=torch.float64)
    assert list(learning_train.by_bucket(nats, nats)) == ['0-128', '128-512', '512-600']


def test_texts(tmp_path: Path):
    content = bytes(range(256)) * 10
    (tmp_path / 'text.xz').write_bytes(lzma.compress(content))
    (tmp_path / 'more').mkdir()
    (tmp_path / 'more' / 'a.gz').write_bytes(gzip.compress(content))
    for data in ('text.xz', 'more'):
        found = learning_data.prepare(str(tmp_path / data), tmp_path / 'cache')
        again = learning_data.prepare(str(tmp_path / data), tmp_path / 'cache')
        assert found == again
        assert Path(found['path']).read_bytes() == content
    splits = learning_data.load(found['path'], found['bytes'])
    assert [len(split) for split in splits.values()] == [2304, 128, 128]
    assert bytes(torch.cat(list(splits.values())).tolist()) == content
    with pytest.raises(SystemExit, match='no such file'):
        learning_data.prepare(str(tmp_path / 'none'), tmp_path)


def test_python_sources(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(learning_data, 'PYTHON_SOURCES_BYTES', 5000)
    monkeypatch.setattr(learning_data.sysconfig, 'get_path', lambda name: str(tmp_path / name))
    for name, size in (('stdlib/b.py', 3000), ('purelib/a.py', 1500), ('platlib/c.py', 9), ('platlib/d.py', 900)):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_bytes(name[-4:-3].encode() * size)
    found = learning_data.prepare('python-sources', tmp_path / 'cache')
    assert Path(found['path']).read_bytes() == b'a' * 1500 + b'b' * 3000 + b'c' * 9 + b'd' * 491


@pytest.mark.full
@pytest.mark.usefixtures('in_process')
def test_resumed_runs_equal_uninterrupted_ones(text: Path, tmp_path: Path):
    variants = ('--variants', 'dense,separate-gate-lr10')
    assert learning.main(flags(tmp_path / 'whole', text, *variants)) == 0
    settings = learning.make_settings(learning.make_parser().parse_args(flags(tmp_path / 'parts', text)))
    for name in ('dense', 'separate-gate-lr10'):
        job = {'variant': name, 'seed': 0, 'commit': 'abc'}
        outcomes = []
        while 'finished' not in outcomes:
            part = iter([False, False, False, True])
            outcomes.append(learning_train.run_job(job, settings, tmp_path / 'parts', part.__next__, print))
        assert outcomes == ['stopped', 'stopped', 'finished']
        assert not list((tmp_path / 'parts' / 'checkpoints').glob('*'))
    whole, parts = results(tmp_path / 'whole'), results(tmp_path / 'parts')
    assert whole.keys() == parts.keys() == {'dense-seed0', 'separate-gate-lr10-seed0'}
    for name, record in whole.items():
        assert without_times(record) == without_times(parts[name])


@pytest.mark.full
def test_runs_in_processes(text: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]):
    """A run that fails is named, and the same command starts it again; finished runs stay."""
    out = tmp_path / 'out'
    command = flags(out, text, '--variants', 'dense,separate')
    assert learning.main([*command, '--time-limit', '1e-6']) == 3
    (out / 'checkpoints').mkdir()
    (out / 'checkpoints' / 'dense-seed0.pt').write_bytes(b'damaged')
    assert learning.main(command) == 1
    assert 'dense-seed0: failed: ' in capfd.readouterr().out
    assert results(out).keys() == {'separate-seed0'}
    (out / 'checkpoints' / 'dense-seed0.pt').unlink()
    assert learning.main(command) == 0
    printed = capfd.readouterr().out
    assert 'dense-seed0: started' in printed
    assert 'separate-seed0: started' not in printed
    record = results(out)['dense-seed0']
    assert record['command'] == ' '.join(['python -m benchmarks.learning', *command])


@pytest.mark.full
def test_runs_and_report(text: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], in_process: list[str]):
    out = tmp_path / 'out'
    assert learning.main(flags(out, text, '--variants', 'dense,separate', '--seeds', '0,1')) == 0
    assert in_process == ['dense-seed0', 'separate-seed0', 'dense-seed1', 'separate-seed1']
    times = {path: path.stat().st_mtime_ns for path in out.glob('*.json')}
    assert learning.main(flags(out, text, '--variants', 'separate,merged', '--seeds', '0', '--longest-first')) == 0
    assert in_process[4:] == ['merged-seed0']
    assert {path: path.stat().st_mtime_ns for path in times} == times
    with pytest.raises(SystemExit, match='of other settings'):
        learning.main(flags(out, text, '--steps', '8', '--variants', 'dense'))
    capsys.readouterr()
    (out / 'notes.md').write_text('Seed 2 is not here.\n')
    assert learning.main(['--report', str(out)]) == 0
    report = (out / 'report.md').read_text()
    assert '\n\nSeed 2 is not here.\n\n' in report
    assert report.strip() == capsys.readouterr().out.strip()
    found = results(out)
    delta = [found[f'separate-seed{seed}']['final_test'] - found[f'dense-seed{seed}']['final_test'] for seed in (0, 1)]
    assert f'0: {learning_report.signed(delta[0])}, 1: {learning_report.signed(delta[1])}' in report
    assert learning_report.signed(sum(delta) / 2) in report
    pictures = {'curves', 'positions', 'gates-separate', 'gates-merged'}
    assert {path.stem for path in out.glob('*.png')} == pictures
    assert all(f'({name}.png)' in report for name in pictures)
    record = found['separate-seed0']
    assert [row['step'] for row in record['valid']] == [row['step'] for row in record['gates']] == [0, 1, 7]
    assert record['valid'][-1]['bpb'] == record['final_valid'] < record['valid'][0]['bpb']
    assert record['parameters'] - found['dense-seed0']['parameters'] == record['parameters_sparse_only']


def test_settings_that_differ_name_their_variants():
    dense, sparse = (
        {'variant': name, 'settings': {'config': {'dim': 8}, 'sparse': {'num_selected_blocks': count}}}
        for name, count in (('dense', 16), ('merged', 32))
    )
    assert learning_report.settings_of([dense, dense]) == 'dim 8, num_selected_blocks 16'
    expected = 'dim 8, num_selected_blocks 16 (dense) or 32 (merged)'
    assert learning_report.settings_of([dense, sparse, sparse]) == expected


@pytest.mark.usefixtures('in_process')
def test_a_run_that_fails_is_named(text: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    assert learning.main(flags(tmp_path / 'out', text, '--lr', '1e30')) == 1
    assert 'dense-seed0: failed: ValueError: dense-seed0: the loss is ' in capsys.readouterr().out
    for wrong, message in ((['--variants', 'none'], 'must be one of'), (['--tokens-per-step', '65'], 'a multiple of')):
        with pytest.raises(SystemExit, match=message):
            learning.main(flags(tmp_path / 'out', text, *wrong))


def test_curves_of_runs_with_other_validations():
    runs = [[{'step': step, 'bpb': 8.0 - step} for step in steps] for steps in ((0, 1, 3), (0, 3))]
    found = learning_report._mean_at([0, 1, 3], runs, lambda row: row['bpb'])
    assert found == pytest.approx([8.0, 6.75, 5.0])  # at step 1 the mean of 7 and, half-way of log 1 to log 4, of 6.5


def test_interval():
    assert learning_report.half_width([1.0]) is None
    assert learning_report.half_width([0.0, 1.0, 2.0]) == pytest.approx(4.303 / 3**0.5)


def test_attention_mass_counts_keys_once():
    q, k = torch.zeros(1, 8, 2, 4), torch.randn(1, 8, 1, 4)  # equal weights
    blocks = torch.tensor([0, -1]).expand(1, 8, 1, 2)
    found = attention_mass(q, k, blocks, block_size=2, window=2, num_selected=1)
    visible = range(1, 9)
    assert found['mass_window'] == pytest.approx(sum(min(n, 2) / n for n in visible) / 8)
    assert found['mass_selected'] == pytest.approx(sum(min(n, 2) / n for n in visible) / 8)
    assert found['mass'] == pytest.approx(sum(min(n, 4) / n for n in visible) / 8)
    assert found['selected_keys'] == pytest.approx(found['mass'])
    assert found['mass_best'] == pytest.approx(sum(min(n, 4) / n for n in visible) / 8)


@pytest.mark.parametrize('name', ['separate', 'merged', 'merged-output-gate', 'merged-scores', 'dense-gated'])
def test_probes(name: str):
    model = build(name, SHAPE, SMALL, 32, seed=0)
    ids = torch.randint(256, (2, 33), generator=torch.Generator().manual_seed(0))
    before = model(ids)
    layers = probe_layers(model, ids, contextlib.nullcontext, SMALL)
    assert torch.equal(model(ids), before)
    assert all(p.grad is None for p in model.parameters())
    gates = gate_means(model, ids, contextlib.nullcontext)
    branches = {'separate': ('compressed', 'selected', 'window'), 'merged-scores': ('merged',), 'dense-gated': ()}
    for layer in layers:
        found = {key.removesuffix('_out') for key in layer if key.endswith('_out')}
        assert found == set(branches.get(name, ('merged', 'compressed')))
        assert 0 < layer['mass_window'] <= layer.get('mass', 1) <= 1 + 1e-6
        assert layer['mass_window'] <= layer['mass_best'] <= 1 + 1e-6
    if name == 'separate':
        expected = torch.tensor([-2.0, -2.0, 2.0]).sigmoid().tolist()
        assert gates['to_strategy_combine'] == [pytest.approx(expected)] * 2
        assert layers[0]['window_grad'] / layers[0]['selected_grad'] == pytest.approx(
            expected[2] / expected[1], rel=1e-3
        )
    if name == 'merged-output-gate':
        kinds = {'to_strategy_combine': -2.0, 'output_gate': 2.0}
        starts = {kind: [[pytest.approx(torch.tensor(start).sigmoid().item())]] * 2 for kind, start in kinds.items()}
        assert gates == starts


def test_probes_of_branches_are_those_before_the_output_gate():
    """In a model of one layer, an open output gate leaves them as they are without it."""
    plain, gated = (build(name, {**SHAPE, 'depth': 1}, SMALL, 32, seed=0) for name in ('merged', 'merged-output-gate'))
    gate = cast(torch.nn.Linear, gated.blocks[0].attention.to_strategy_combine)
    ids = torch.randint(256, (2, 33), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        gate.bias[1::2] = 20.0
    expected, found = (probe_layers(model, ids, contextlib.nullcontext, SMALL)[0] for model in (plain, gated))
    for name in ('merged_out', 'merged_grad', 'compressed_out', 'compressed_grad'):
        assert found[name] == pytest.approx(expected[name], rel=1e-4), name
    with torch.no_grad():
        gate.bias[1::2] = 0.0
    halved = probe_layers(gated, ids, contextlib.nullcontext, SMALL)[0]
    assert halved['merged_out'] == pytest.approx(expected['merged_out'], rel=1e-4)
    assert halved['compressed_out'] == pytest.approx(expected['compressed_out'], rel=1e-4)


def test_groups_of_queries_read_the_blocks_of_their_first(monkeypatch: pytest.MonkeyPatch):
    selected = torch.arange(40)[None, :, None, None]
    monkeypatch.setattr(learning_layers, 'select_blocks', lambda *scored, **settings: selected)
    attention = build('merged-dense-mass-far-output-gate-first16', SHAPE, SMALL, 32, seed=0).blocks[0].attention
    assert isinstance(attention, learning_layers.FirstChoice)
    assert attention._choose().flatten().tolist() == [0] * 16 + [16] * 16 + [32] * 8


def test_options_are_those_of_the_model():
    options = learning.make_parser().parse_args(['--window', '100', '--dim', '64'])
    assert (options.window, options.dim, options.lr, options.expand) == (100, 64, 1e-3, 0.125)
