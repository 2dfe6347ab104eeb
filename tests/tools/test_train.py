"""The trainer: computation, files, exact resume and refusals."""

import contextlib
import math
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from dataclasses import asdict, fields, replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

import train_enwik8
from native_sparse_attention.nn import attention as layers
from tests.support.training_runs import assert_same_run, command, contents, rows, write_words
from train_enwik8 import PRESETS, Config, Run, UserError, main
from trainer import record
from trainer.config import SPARSE_ONLY
from trainer.tensors import load_tensors, read_newest

pytestmark = pytest.mark.usefixtures('no_pictures')


@pytest.fixture(autouse=True)
def one_thread_and_own_signals() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    handlers = {s: signal.getsignal(s) for s in (signal.SIGINT, signal.SIGTERM)}
    yield
    torch.set_num_threads(threads)
    for s, handler in handlers.items():
        signal.signal(s, handler)


@pytest.fixture
def text(tmp_path: Path) -> Path:
    return write_words(tmp_path)


@pytest.fixture
def runs(tmp_path: Path) -> Path:
    return tmp_path / 'runs'


def new_run(text: Path, runs: Path, **settings: Any) -> Run:
    return train_enwik8.open_run(*train_enwik8.parse(command(text, runs, **settings)), contextlib.ExitStack())


@pytest.mark.parametrize('length', [2, 9, 16, 17, 18, 33, 100])
@pytest.mark.parametrize('seq_len', [1, 8, 16])
@pytest.mark.parametrize('batch', [1, 3])
def test_windows_predict_each_byte_but_the_first_once(length: int, seq_len: int, batch: int) -> None:
    text = torch.arange(length, dtype=torch.uint8)
    cut = list(train_enwik8.windows(text, seq_len, batch))
    assert torch.cat([ids[:, 1:].flatten() for ids in cut]).tolist() == list(range(1, length))
    for ids in cut:
        assert ids.dtype == torch.int64
        assert ids.shape[0] <= batch
        assert ids.shape[1] <= seq_len + 1
        assert torch.equal(ids[:, 1:], ids[:, :-1] + 1)


def test_evaluation_is_the_mean_over_every_byte(text: Path, runs: Path, capsys) -> None:
    run = new_run(text, runs, eval_bytes=0)
    runs.joinpath('cpu-sparse-words.txt').mkdir(parents=True)
    run.evaluate('valid')
    run.evaluate('valid')
    valid = run.corpus.splits['valid'].long()
    nats = 0.0
    with torch.no_grad():
        for start in range(0, len(valid) - 1, 16):
            ids = valid[start : start + 17]
            logits = run.model(ids[None, :-1])[0].double()
            nats -= logits.log_softmax(-1).gather(1, ids[1:, None]).sum().item()
    first, second = rows(run.folder)
    assert first == second
    assert first['bpb'] == pytest.approx(nats / math.log(2) / (len(valid) - 1), rel=1e-5)
    assert (first['corpus'], first['split'], first['bytes']) == ('words.txt', 'valid', 100)
    assert 'words.txt, all 100 bytes' in capsys.readouterr().out


def test_schedule() -> None:
    config = Config(steps=100, warmup=10, lr=1.0, min_lr=0.1)
    rates = [train_enwik8.learning_rate(step, config) for step in range(100)]
    assert rates[:10] == pytest.approx([0.1 * n for n in range(1, 11)])
    assert rates[10] == 1.0
    assert rates[10:] == sorted(rates[10:], reverse=True)
    assert rates[99] == pytest.approx(0.1)
    assert rates[54] == pytest.approx(0.55, abs=0.02)
    assert train_enwik8.learning_rate(0, replace(config, steps=1, warmup=0)) == 1.0


def test_only_weight_matrices_decay(text: Path, runs: Path) -> None:
    run = new_run(text, runs)
    decayed, rest = run.optimizer.param_groups
    names = {p: name for name, p in run.model.named_parameters()}
    assert {*decayed['params'], *rest['params']} == set(names)
    assert len(decayed['params']) + len(rest['params']) == len(names)
    assert decayed['weight_decay'] > 0
    assert rest['weight_decay'] == 0
    assert all(p.ndim >= 2 and names[p].endswith('weight') for p in decayed['params'])
    assert not any('bias' not in names[p] and 'weight' in names[p] and p.ndim == 2 for p in rest['params'])


def test_data_of_a_step_depends_on_seed_and_step_alone() -> None:
    text, config = torch.arange(200, dtype=torch.uint8), Config(seq_len=16, batch=3, grad_accum=2)
    one = train_enwik8.draw(text, config, 7)
    torch.rand(5)
    assert one.shape == (2, 3, 17)
    assert torch.equal(one, train_enwik8.draw(text, config, 7))
    assert not torch.equal(one, train_enwik8.draw(text, config, 8))
    assert not torch.equal(one, train_enwik8.draw(text, replace(config, seed=1), 7))
    shortest = train_enwik8.draw(text[:17], config, 0)
    assert torch.equal(shortest, text[:17].long().expand(2, 3, 17))


@pytest.mark.pictures
@pytest.mark.parametrize('attention', ['sparse', 'dense'])
def test_a_run_and_what_it_writes(text: Path, runs: Path, capsys, attention: str) -> None:
    assert main(command(text, runs, attention=attention)) == 0
    folder = runs / f'cpu-{attention}-words.txt'
    expected = {'checkpoint.pt', 'tensors-000012', 'log.jsonl', 'loss.png', 'sample-000006.txt', 'sample-000012.txt'}
    assert {p.name for p in folder.iterdir()} == expected
    log = rows(folder, timeless=False)
    assert all(row['corpus'] == 'words.txt' for row in log)
    figures = [(row['split'], row['step'], row['bytes']) for row in log if 'split' in row]
    train = [('train', step, 3 * 2 * 2 * 16) for step in (3, 6, 9, 12)]
    assert [f for f in figures if f[0] == 'train'] == train
    assert [f for f in figures if f[0] != 'train'] == [
        *[('valid', step, 50) for step in (0, 1, 2, 5, 10, 12)], ('test', 12, 50),
    ]  # fmt: skip
    assert log[-1]['bpb'] < 8
    assert all(row['tokens_per_s'] > 0 for row in log if row.get('split') == 'train')
    assert 'words.txt' in (folder / 'sample-000012.txt').read_text()
    assert (folder / 'loss.png').read_bytes().startswith(b'\x89PNG')
    printed = capsys.readouterr().out
    assert 'test' in printed
    assert 'words.txt, first 50 of 100 bytes' in printed
    assert '--- continued ---' in printed


@pytest.mark.parametrize(('seconds', 'steps'), [(0, (3, 6, 9, 12)), (1e9, (3,))])
def test_lines_of_progress_without_a_terminal(
    text: Path, runs: Path, capsys, monkeypatch, seconds: float, steps: tuple[int, ...]
) -> None:
    monkeypatch.setattr(record, 'LINE_SECONDS', seconds)
    assert main(command(text, runs)) == 0
    lines = [line for line in capsys.readouterr().out.splitlines() if ': train ' in line]
    assert [line.split(':')[0] for line in lines] == [f'step {step} of 12' for step in steps]
    assert all(line.endswith(' tokens/s') and ' bits per byte, ' in line for line in lines)


@pytest.mark.parametrize(
    'stop',
    [
        pytest.param('signal in step 3', marks=pytest.mark.full),
        'signal in step 8',
        pytest.param('signal in evaluation', marks=pytest.mark.full),
        'crash in step 7',
    ],
)
def test_resumed_is_uninterrupted_bit_for_bit(text: Path, runs: Path, monkeypatch, stop: str) -> None:
    # The loss of the block scores draws some of the queries.
    monkeypatch.setattr(layers, 'block_score_loss', partial(layers.block_score_loss, num_queries=4))
    flags = ['--merge-window', '--output-gate', '--qk-norm', '--block-loss', '0.1']
    assert main(command(text, runs, '--name', 'whole', *flags)) == 0
    with monkeypatch.context() as patch:
        code = arrange(patch, stop)
        if code is None:
            with pytest.raises(ZeroDivisionError):
                main(command(text, runs, '--name', 'cut', *flags))
        else:
            assert main(command(text, runs, '--name', 'cut', *flags)) == code
    torch.manual_seed(1234)
    assert main(['--name', 'cut', '--runs-dir', str(runs), '--device', 'cpu', '--resume']) == 0
    assert_same_run(runs / 'whole', runs / 'cut')


@pytest.mark.gpu
@pytest.mark.parametrize('device', ['cuda:0', 'cuda:1'])
@pytest.mark.parametrize('attention', ['sparse', 'dense'])
def test_steps_that_are_replayed(attention: str, device: str, text: Path, runs: Path) -> None:
    """Replayed steps equal launched ones, on a GPU that is not the current one too."""
    if int(device[-1]) >= torch.cuda.device_count():
        pytest.skip(f'there is no {device}')
    losses = []
    for more in ([], ['--no-graph']):
        flags = command(text, runs, *more, '--device', device, attention=attention, dim_head=16)
        run = train_enwik8.open_run(*train_enwik8.parse(flags), contextlib.ExitStack())
        for _ in range(6):
            run.train_step()
        assert (run.graph is None) == bool(more)
        losses.append(torch.stack(run.recent))
    assert losses[0][-1] < losses[0][0]
    torch.testing.assert_close(*losses, rtol=1e-2, atol=0)


def arrange(patch: pytest.MonkeyPatch, stop: str) -> int | None:
    """Make a signal arrive or the process fail at a point of the next run; return the exit code that follows."""
    train_step, loss = Run.train_step, Run.loss

    def step_and_signal(self: Run) -> None:
        train_step(self)
        if stop == f'signal in step {self.step}':
            os.kill(os.getpid(), signal.SIGINT)
        if stop == f'crash in step {self.step}':
            raise ZeroDivisionError

    def loss_and_signal(self: Run, ids: torch.Tensor) -> torch.Tensor:
        if stop == 'signal in evaluation' and self.step == 5 and not torch.is_grad_enabled():
            os.kill(os.getpid(), signal.SIGTERM)
        return loss(self, ids)

    patch.setattr(Run, 'train_step', step_and_signal)
    patch.setattr(Run, 'loss', loss_and_signal)
    return {'signal in evaluation': 143, 'crash in step 7': None}.get(stop, 130)


@pytest.mark.full
def test_sigterm_saves_and_the_run_goes_on(text: Path, runs: Path) -> None:
    settings = {'steps': 70, 'log_every': 1, 'eval_every': 50, 'sample_every': 50, 'save_every': 10_000}
    arguments = command(text, runs, '--name', 'cut', **settings)
    environment = {**os.environ, 'OMP_NUM_THREADS': '1'}
    script = [sys.executable, train_enwik8.__file__]
    pipes: dict[str, Any] = {'stdout': subprocess.PIPE, 'stderr': subprocess.DEVNULL, 'text': True}
    with subprocess.Popen(script + arguments, env=environment, **pipes) as process:
        assert process.stdout is not None
        watchdog = threading.Timer(120, process.kill)
        watchdog.start()
        assert any(line.startswith('step 1 of 70: train ') for line in process.stdout)  # goes through the pipe at once
        process.terminate()
        printed = process.stdout.read()
        watchdog.cancel()
    assert process.returncode == 143
    assert 'interrupted and saved at step' in printed
    assert 0 < torch.load(runs / 'cut' / 'checkpoint.pt', weights_only=True)['step'] < 70
    assert main([*arguments, '--resume']) == 0
    assert main(command(text, runs, '--name', 'whole', **settings)) == 0
    assert_same_run(runs / 'whole', runs / 'cut')


@pytest.fixture
def finished(text: Path, runs: Path, capsys) -> Path:
    assert main(command(text, runs, '--name', 'done', steps=2, warmup=1)) == 0
    capsys.readouterr()
    return runs / 'done'


def refused(arguments: list[str], capsys) -> str:
    """Return the one line that main prints before it returns 2."""
    assert main(arguments) == 2
    printed = capsys.readouterr()
    assert printed.out == ''
    assert printed.err.startswith('train_enwik8.py: ')
    assert printed.err.count('\n') == 1
    return printed.err


@pytest.mark.parametrize(
    ('more', 'message'),
    [
        (['--name', 'done'], 'done: exists already'),
        (['--name', 'done', '--resume'], 'done: finished after 2 steps'),
        (['--name', 'done', '--resume', '--dim', '32'], '--dim 32: '),
        (['--name', 'done', '--resume', '--steps', '99'], '--steps 99: '),
        (['--name', 'done', '--resume', '--attention', 'dense'], '--attention dense: '),
        (['--name', 'done', '--resume', '--preset', 'base'], '--preset base: '),
        (['--name', 'none', '--resume'], 'none/checkpoint.pt: no such checkpoint (runs that have one: done)'),
        (['--name', 'none', '--check-decode'], 'none/checkpoint.pt: no such checkpoint'),
    ],
)
def test_an_existing_run_is_left_alone(finished: Path, text: Path, capsys, more: list[str], message: str) -> None:
    before = contents(finished.parent)
    if '--resume' in more:
        arguments = ['--runs-dir', str(finished.parent), '--device', 'cpu', '--data', str(text), *more]
    else:
        arguments = command(text, finished.parent, *more)
    assert message in refused(arguments, capsys)
    assert contents(finished.parent) == before


def test_another_text_is_refused(finished: Path, text: Path, tmp_path: Path, capsys) -> None:
    before = contents(finished)
    other = tmp_path / 'other.txt'
    other.write_bytes(text.read_bytes()[::-1])
    line = refused(['--data', str(other), '--runs-dir', str(finished.parent), '--name', 'done', '--resume'], capsys)
    assert 'other.txt' in line
    assert 'words.txt' in line
    assert contents(finished) == before


@pytest.mark.parametrize(
    ('more', 'message'),
    [
        (['--data', '/no/such/file'], '/no/such/file: No such file'),
        (['--seq-len', '1801'], 'words.txt: 1,800 bytes in split train, but --seq-len 1801 needs 1,802'),
        (['--eval-bytes', '1'], 'words.txt: 1 bytes in split valid'),
        (['--steps', '0'], '--steps 0: must be at least 1'),
        (['--lr', 'nan'], '--lr nan: must be at least 0'),
        (['--batch', 'many'], '--batch'),
        (['--attention', 'linear'], '--attention'),
        (['--no-such-flag'], '--no-such-flag'),
        (['--kv-heads', '3'], 'kv_heads'),
        (['--backend', 'cudnn'], 'backend'),
        (
            ['--backend', 'eager', '--attention', 'dense'],
            '--backend eager: must be auto, since the model has dense attention',
        ),
        (['--output-gate', '--attention', 'dense'], '--output-gate: must be left out with --attention dense'),
        (['--no-output-gate', '--attention', 'dense'], '--no-output-gate: must be left out with --attention dense'),
        (['--block-loss', '0.1', '--attention', 'dense'], '--block-loss 0.1: must be left out with --attention dense'),
        (['--check-decode', '--wandb'], '--wandb: not with --check-decode, which trains nothing'),
        (['--check-decode', '--no-graph'], '--no-graph: not with --check-decode, which trains nothing'),
        (['--device', 'abacus'], '--device abacus: '),
        (
            ['--dp', '2'],
            '--dp 2 --cp 1 --tp 1: the number of processes is 1, but must be 2 (torchrun --nproc-per-node)',
        ),
        (['--tp', '2'], '--tp 2: the number of processes is 1, but must be a multiple of 2'),
        (['--top-p', '1.5'], 'top_p'),
        (['--wandb'], 'wandb is not installed'),
    ],
)
def test_user_errors_are_one_line_and_write_nothing(
    text: Path, runs: Path, capsys, monkeypatch, more: list[str], message: str
) -> None:
    monkeypatch.setitem(sys.modules, 'wandb', None)
    assert message in refused(command(text, runs, *more), capsys)
    assert not runs.exists()


@pytest.mark.parametrize('name', sorted(f.name for f in fields(Config) if {'sparse', 'model'} & f.metadata.keys()))
def test_flags_of_sparse_attention_are_those_that_a_dense_model_ignores(name: str) -> None:
    config = replace(Config(**PRESETS['cpu']), attention='dense')
    value = getattr(config, name)
    other = replace(config, **{name: not value if isinstance(value, bool) else value * 2})
    models = [train_enwik8.build_model(c, 'auto', torch.device('meta')) for c in (config, other)]
    shapes = [[(name, p.shape) for name, p in model.named_parameters()] for model in models]
    assert (shapes[0] == shapes[1]) == (name in SPARSE_ONLY)


@pytest.mark.parametrize('old', ['--resume', '--check-decode'])
def test_a_dense_run_may_have_been_started_with_flags_of_sparse_attention(old: str) -> None:
    _, given = train_enwik8.parse([old, '--attention', 'dense', '--output-gate'])
    assert given == {'attention': 'dense', 'output_gate': True}


def test_a_loss_that_is_not_finite_ends_the_run(text: Path, runs: Path, capsys, monkeypatch) -> None:
    loss = Run.loss
    monkeypatch.setattr(Run, 'loss', lambda self, ids: loss(self, ids) * (math.nan if self.step == 6 else 1))
    assert main(command(text, runs, '--name', 'lost')) == 2
    assert 'step 9: the loss is nan' in capsys.readouterr().err


def test_a_failed_save_leaves_the_last_checkpoint(text: Path, runs: Path, monkeypatch) -> None:
    run = new_run(text, runs)
    run.folder.mkdir(parents=True)
    run.save()
    before = (run.folder / 'checkpoint.pt').read_bytes()

    def half(_: Any, file: Any) -> None:
        file.write(b'half a checkpoint')
        raise OSError(28, 'No space left on device')

    monkeypatch.setattr(torch, 'save', half)
    with pytest.raises(OSError, match='No space'):
        run.save()
    assert (run.folder / 'checkpoint.pt').read_bytes() == before


@pytest.mark.parametrize('attention', ['sparse', 'dense'])
def test_check_decode(text: Path, runs: Path, capsys, attention: str) -> None:
    assert main(command(text, runs, '--name', 'done', steps=4, attention=attention, sample_bytes=40)) == 0
    before = contents(runs)
    check = ['--runs-dir', str(runs), '--name', 'done', '--device', 'cpu', '--check-decode']
    capsys.readouterr()
    assert main(check) == 0
    printed = capsys.readouterr().out
    assert 'decoding agrees with the full forward' in printed
    assert '40 of 40 greedy bytes' in printed
    assert contents(runs) == before


def test_check_decode_sees_a_wrong_cache(text: Path, runs: Path, capsys, monkeypatch) -> None:
    assert main(command(text, runs, '--name', 'done', steps=4)) == 0
    forward = train_enwik8.Transformer.forward

    def off(self: Any, ids: torch.Tensor, *rest: Any, cache: Any = None, **more: Any) -> Any:
        out = forward(self, ids, *rest, cache=cache, **more)
        return out if cache is None else out + 1e-6

    monkeypatch.setattr(train_enwik8.Transformer, 'forward', off)
    assert main(['--runs-dir', str(runs), '--name', 'done', '--device', 'cpu', '--check-decode']) == 1
    assert 'DIFFERS' in capsys.readouterr().out


def test_presets_and_help(capsys) -> None:
    for changes in PRESETS.values():
        assert changes.keys() <= asdict(Config()).keys()
    with pytest.raises(SystemExit) as end:
        main(['--help'])
    assert end.value.code == 0
    printed = capsys.readouterr().out
    assert all(train_enwik8.spelled(name) in printed for name in asdict(Config()))
    with pytest.raises(UserError):
        train_enwik8.parse(['--steps'])


SAMPLE = ['--device', 'cpu', '--sample']


@pytest.mark.full
def test_sample_prints_text_of_the_checkpoint(finished: Path) -> None:
    prompt, count = 'some “wörds” ', 300
    arguments = [*SAMPLE, str(finished), '--prompt', prompt, '--tokens', str(count), '--seed', '5', '--top-p', '0.9']
    done = subprocess.run(
        [sys.executable, train_enwik8.__file__, *arguments],
        env={**os.environ, 'OMP_NUM_THREADS': '1', 'PYTHONIOENCODING': 'utf-8'},
        capture_output=True,
        timeout=120,
    )
    state = train_enwik8.load_checkpoint(finished)
    model = train_enwik8.build_model(state['config'], 'auto', torch.device('cpu'))
    load_tensors(finished / state['tensors'], model)
    ids = torch.tensor([list(prompt.encode())])
    written = bytes(model.generate(ids, count, 1.0, top_p=0.9, seed=5)[0].tolist())
    # After two steps of training samples are no text, so the decoder holds back and replaces characters.
    assert done.stdout.decode() == (prompt.encode() + written).decode(errors='replace') + '\n'
    assert f'{count} tokens, the first after ' in done.stderr.decode()
    assert done.stderr.decode().rstrip().endswith('tokens/s')
    assert done.returncode == 0


def test_sample_of_little(finished: Path, capsys, monkeypatch) -> None:
    monkeypatch.delattr(train_enwik8, 'build_optimizer')
    before = contents(finished)
    written = []
    for seed in ('0', '0', '1'):
        assert main([*SAMPLE, str(finished), '--tokens', '40', '--seed', seed]) == 0
        written.append(capsys.readouterr().out)
    assert written[0] == written[1] != written[2]
    assert written[0].startswith('\n')
    assert main([*SAMPLE, str(finished), '--tokens', '1']) == 0
    assert 'tokens/s' not in capsys.readouterr().err
    assert contents(finished) == before


def test_a_checkpoint_that_is_replaced_while_it_is_read(finished: Path) -> None:
    state = train_enwik8.load_checkpoint(finished)
    read: list[str] = []

    def load(state: dict[str, Any]) -> None:
        read.append(state['tensors'])
        load_tensors(
            finished / state['tensors'], train_enwik8.build_model(state['config'], 'auto', torch.device('cpu'))
        )

    read_newest(finished, {**state, 'tensors': 'tensors-000001'}, load)
    assert read == ['tensors-000001', 'tensors-000002']


SAMPLE_ERRORS = [
    (['--tokens', '0'], '--tokens 0: must be at least 1'),
    (['--prompt', ''], '--prompt: must have at least 1 byte'),
    (['--dim', '32'], '--dim: not with --sample'),
    (['--resume'], '--resume: not with --sample'),
    (['--check-decode', '--wandb'], '--check-decode, --wandb: not with --sample'),
    (['--runs-dir', 'elsewhere', '--name', 'other'], '--name, --runs-dir: not with --sample'),
    (['--preset', 'long', '--data', 'stdlib'], '--data, --preset: not with --sample'),
    (['--compile', '--seed', '3'], '--compile: not with --sample'),
    (['--top-p', '1.5'], 'top_p is 1.5'),
    (['--seed', str(2**32)], 'seed is 4294967296'),
    (['--backend', 'cudnn'], 'backend'),
    (['--device', 'abacus'], '--device abacus: '),
]


@pytest.mark.full
def test_sample_errors(finished: Path, capsys) -> None:
    for more, message in SAMPLE_ERRORS:
        assert message in refused([*SAMPLE, str(finished), *more], capsys)


def test_sample_errors_of_the_run(finished: Path, capsys) -> None:
    none = finished.parent / 'none'
    assert f'{none}/checkpoint.pt: no such checkpoint (runs that have one: done)' in refused(
        [*SAMPLE, str(none)], capsys
    )
    state = torch.load(finished / 'checkpoint.pt', weights_only=True)
    torch.save({**state, 'config': {**state['config'], 'dim': 32}}, finished / 'checkpoint.pt')
    assert 'tensors-000002: damaged or of another shape' in refused([*SAMPLE, str(finished)], capsys)
    assert '--prompt and --tokens: need --sample' in refused(['--prompt', 'the'], capsys)
