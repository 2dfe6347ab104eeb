"""The folder of a run: lock, atomic writes, full disk, names, damaged checkpoints, --compare and the network."""

import errno
import gzip
import json
import lzma
import os
import random
import shutil
import subprocess
import sys
import threading
import zipfile
from pathlib import Path
from typing import Any

import pytest
import torch

import train_enwik8
from tests.support.training_runs import assert_same_run, command, contents, rows, write_words
from train_enwik8 import Run, UserError, main
from trainer import corpus, folder, plots
from trainer.folder import lock_run, read_rows, write_atomically

pytestmark = pytest.mark.usefixtures('no_pictures')


@pytest.fixture
def text(tmp_path: Path) -> Path:
    return write_words(tmp_path)


@pytest.fixture
def runs(tmp_path: Path) -> Path:
    return tmp_path / 'runs'


@pytest.fixture(autouse=True)
def no_network(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any, **__: Any) -> None:
        raise AssertionError('the network is asked')

    monkeypatch.setattr(corpus, 'download', refuse)


def refused(arguments: list[str], capsys) -> str:
    assert main(arguments) == 2
    printed = capsys.readouterr().err
    assert printed.count('\n') == 1
    return printed


def resume(runs: Path, name: str, *more: str) -> list[str]:
    return ['--runs-dir', str(runs), '--name', name, '--device', 'cpu', '--resume', *more]


def interrupt_at(patch: pytest.MonkeyPatch, step: int) -> None:
    train_step = Run.train_step

    def interrupted(self: Run) -> None:
        train_step(self)
        if self.step == step:
            self.signals.append(15)

    patch.setattr(Run, 'train_step', interrupted)


def test_second_process_gets_the_name_of_the_holder(text: Path, runs: Path, capsys, monkeypatch) -> None:
    with monkeypatch.context() as patch:
        interrupt_at(patch, 5)
        assert main(command(text, runs, '--name', 'one')) == 143
    capsys.readouterr()
    script = (
        'import sys, pathlib\nfrom trainer.folder import lock_run\n'
        'with lock_run(pathlib.Path(sys.argv[1])): print("locked", flush=True); sys.stdin.read()'
    )
    pipes: dict[str, Any] = {'stdin': subprocess.PIPE, 'stdout': subprocess.PIPE, 'text': True}
    root = Path(train_enwik8.__file__).parent
    with subprocess.Popen([sys.executable, '-c', script, str(runs / 'one')], cwd=root, **pipes) as holder:
        assert holder.stdout is not None
        assert holder.stdout.readline() == 'locked\n'
        before = contents(runs)
        assert f'in use by process {holder.pid} on {os.uname().nodename}' in refused(resume(runs, 'one'), capsys)
        assert contents(runs) == before
        holder.kill()
        holder.wait()
    assert (runs / 'one' / 'lock').exists()  # left by the killed process, and taken over
    assert main(resume(runs, 'one')) == 0
    assert not (runs / 'one' / 'lock').exists()


def test_lock_removes_partial_files_and_itself(tmp_path: Path) -> None:
    (tmp_path / 'checkpoint.pt.0123.part').write_bytes(b'half')
    with lock_run(tmp_path):
        assert [p.name for p in tmp_path.iterdir()] == ['lock']
        with pytest.raises(UserError, match='in use'), lock_run(tmp_path):
            pass
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize('text', ['', 'process {dead} on {host}'])
def test_the_holder_of_a_lock_that_has_not_written_its_name(text: str, tmp_path: Path) -> None:
    """Text that a killed process left is not taken for the holder's name."""
    host, lock = os.uname().nodename, tmp_path / 'lock'
    with subprocess.Popen([sys.executable, '-c', '']) as process:
        process.wait()
    with lock_run(tmp_path):
        own = lock.read_text()
        lock.write_text(text.format(dead=process.pid, host=host))
        threading.Timer(0.1, lock.write_text, [own]).start()
        with pytest.raises(UserError, match=f'in use by process {os.getpid()} on {host}'), lock_run(tmp_path):
            pass


def test_write_atomically_keeps_the_old_file(tmp_path: Path, monkeypatch) -> None:
    path = tmp_path / 'file'
    write_atomically(path, b'old')

    def full(_: int) -> None:
        raise OSError(errno.ENOSPC, 'No space left on device')

    monkeypatch.setattr(folder.os, 'fsync', full)
    with pytest.raises(OSError, match='No space') as error:
        write_atomically(path, b'new')
    assert error.value.filename == str(path)
    assert contents(tmp_path) == {'file': b'old'}


@pytest.mark.full
def test_full_disk_ends_the_run_in_one_line(text: Path, runs: Path, capsys, monkeypatch) -> None:
    """The fake `fsync` fails from some call on; the run then goes on from its last checkpoint."""
    fsync = os.fsync
    assert main(command(text, runs, '--name', 'whole')) == 0
    for first_failure in (1, 3, 4, 5, 8, 11):
        name, calls = f'cut-{first_failure}', []
        checkpoint = runs / name / 'checkpoint.pt'

        def full(descriptor: int, first=first_failure, calls=calls, checkpoint=checkpoint) -> None:
            calls.append(checkpoint.exists())
            if len(calls) >= first:
                raise OSError(errno.ENOSPC, 'No space left on device')
            fsync(descriptor)

        capsys.readouterr()
        with monkeypatch.context() as patch:
            patch.setattr(folder.os, 'fsync', full)
            line = refused(command(text, runs, '--name', name), capsys)
        assert f'runs/{name}/' in line
        assert line.endswith(': No space left on device\n')
        assert not list((runs / name).glob('*.part'))
        started = checkpoint.exists()
        named = [torch.load(checkpoint, weights_only=True)['tensors']] if started else []
        assert [path.name for path in (runs / name).glob('tensors-*')] == named
        assert started == any(calls)
        assert main(resume(runs, name) if started else command(text, runs, '--name', name)) == 0
        assert_same_run(runs / 'whole', runs / name)


def test_log_line_that_does_not_fit_is_taken_back(tmp_path: Path, monkeypatch) -> None:
    folder.append_row(tmp_path, {'step': 0})
    before = contents(tmp_path)

    opened = Path.open

    class Full:
        """A file that writes half of its input."""

        def __init__(self, path: Path, mode: str) -> None:
            self.file = opened(path, mode)

        def __enter__(self) -> 'Full':
            return self

        def __exit__(self, *_: object) -> None:
            self.file.close()

        def write(self, content: bytes) -> None:
            self.file.write(content[: len(content) // 2])
            raise OSError(errno.ENOSPC, 'No space left on device')

    monkeypatch.setattr(Path, 'open', lambda path, mode: Full(path, mode))
    with pytest.raises(OSError, match='No space') as error:
        folder.append_row(tmp_path, {'step': 1})
    assert error.value.filename == str(tmp_path / 'log.jsonl')
    monkeypatch.undo()
    assert contents(tmp_path) == before


def test_death_before_the_first_save_does_not_block_the_name(text: Path, runs: Path, capsys) -> None:
    left = runs / 'one'
    left.mkdir(parents=True)
    for name in ('log.jsonl', 'lock', 'checkpoint.pt.0123.part'):
        (left / name).write_bytes(b'{"step": 0')
    assert main(command(text, runs, '--name', 'one')) == 0
    assert rows(left)[0]['preset'] == 'cpu'
    (runs / 'two').mkdir()
    (runs / 'two' / 'notes.txt').write_bytes(b'of another kind')
    capsys.readouterr()
    assert 'two: exists already' in refused(command(text, runs, '--name', 'two'), capsys)


DAMAGES: dict[str, Any] = {
    'truncated': lambda path, state, tensors: path.write_bytes(path.read_bytes()[:-1000]),
    'empty': lambda path, state, tensors: path.write_bytes(b''),
    'not a checkpoint': lambda path, state, tensors: path.write_bytes(b'a text of some length'),
    'another version': lambda path, state, tensors: torch.save({**state, 'config': {**state['config'], 'a': 1}}, path),
    'another shape': lambda path, state, tensors: torch.save({**state, 'config': {**state['config'], 'dim': 32}}, path),
    'no tensors': lambda path, state, tensors: shutil.rmtree(tensors),
    'truncated tensors': lambda path, state, tensors: truncate(*tensors.glob('*.distcp')),
    'no metadata': lambda path, state, tensors: (tensors / '.metadata').unlink(),
    'truncated metadata': lambda path, state, tensors: truncate(tensors / '.metadata'),
}
IN_TENSORS = ('another shape', 'no tensors', 'truncated tensors', 'no metadata', 'truncated metadata')


def truncate(file: Path) -> None:
    file.write_bytes(file.read_bytes()[:-100])


@pytest.mark.parametrize('damage', DAMAGES)
def test_a_bad_checkpoint_is_refused(text: Path, runs: Path, capsys, caplog, damage: str) -> None:
    assert main(command(text, runs, '--name', 'one', steps=2, warmup=1)) == 0
    capsys.readouterr()
    path = runs / 'one' / 'checkpoint.pt'
    state = torch.load(path, weights_only=True)
    tensors = runs / 'one' / state['tensors']
    DAMAGES[damage](path, state, tensors)
    before = contents(runs)
    assert str(tensors if damage in IN_TENSORS else path) in refused(resume(runs, 'one'), capsys)
    # PyTorch logs tracebacks, which a process without a handler prints.
    assert not [record for record in caplog.records if 'NullHandler' not in record.name]
    assert contents(runs) == before


def test_checkpoint_without_a_key_is_refused_in_one_line(text: Path, runs: Path, capsys) -> None:
    assert main(command(text, runs, '--name', 'one', steps=2)) == 0
    path = runs / 'one' / 'checkpoint.pt'
    state = torch.load(path, weights_only=True)
    assert set(state) == set(folder.STATE_KEYS)
    capsys.readouterr()
    for key in state:
        torch.save({k: v for k, v in state.items() if k != key}, path)
        line = refused(resume(runs, 'one'), capsys)
        assert str(path) in line
        assert key in line
    for key in ('dim', 'seed'):
        torch.save({**state, 'config': {k: v for k, v in state['config'].items() if k != key}}, path)
        assert f'config.{key}' in refused(['--sample', str(runs / 'one'), '--device', 'cpu'], capsys)


def test_switches_younger_than_the_run_are_off(text: Path, runs: Path, capsys) -> None:
    assert main(command(text, runs, '--name', 'one', '--merge-window', steps=2)) == 0
    path = runs / 'one' / 'checkpoint.pt'
    state = torch.load(path, weights_only=True)
    del state['config']['output_gate'], state['config']['select_before_window']
    torch.save(state, path)
    assert main(['--name', 'one', '--runs-dir', str(runs), '--device', 'cpu', '--check-decode']) == 0
    capsys.readouterr()
    assert '--output-gate True: ' in refused(resume(runs, 'one', '--output-gate'), capsys)


@pytest.mark.parametrize('name', ['../out', '/elsewhere', '.', 'a/../..', 'a/../../runs-2'])
@pytest.mark.parametrize('more', [[], ['--resume'], ['--check-decode']])
def test_name_stays_below_runs_dir(text: Path, runs: Path, capsys, name: str, more: list[str]) -> None:
    arguments = ['--data', str(text), '--runs-dir', str(runs), '--name', name, '--device', 'cpu', *more]
    assert f'--name {name}: leaves --runs-dir' in refused(arguments, capsys)
    assert not runs.exists()


def test_archives_are_unpacked_with_a_bound(tmp_path: Path) -> None:
    (tmp_path / 'a.gz').write_bytes(gzip.compress(bytes(10_000)))
    with zipfile.ZipFile(tmp_path / 'a.zip', 'w', zipfile.ZIP_DEFLATED) as archive:
        for name in 'bc':
            archive.writestr(name, bytes(5_000))
    for name in ('a.gz', 'a.zip'):
        assert corpus.read(tmp_path / name, limit=10_000) == bytes(10_000)
        with pytest.raises(UserError, match=f'{name}: unpacks to more than'):
            corpus.read(tmp_path / name, limit=9_999)


@pytest.mark.parametrize('kind', [zipfile.ZIP_LZMA, zipfile.ZIP_BZIP2, zipfile.ZIP_DEFLATED, zipfile.ZIP_STORED])
def test_every_damage_to_an_archive_is_one_line(tmp_path: Path, capsys, kind: int) -> None:
    path, generator = tmp_path / 'a.zip', random.Random(kind)
    with zipfile.ZipFile(path, 'w', kind) as archive:
        archive.writestr('text', bytes(generator.choices(b'some of the words ', k=3000)))
    good, messages = path.read_bytes(), []
    for _ in range(100):
        bad = bytearray(good)
        for _ in range(generator.choice((1, 3, 20))):
            bad[generator.randrange(len(bad))] = generator.randrange(256)
        path.write_bytes(bad[: generator.choice((len(bad), len(bad) // 2))])
        try:
            corpus.read(path, limit=10**6)
        except UserError as error:
            messages.append(str(error))
    assert len(messages) > 50
    assert not any('\n' in message for message in messages)


def test_lzma_error_is_one_line(tmp_path: Path, capsys, monkeypatch) -> None:
    def broken(*_: Any) -> bytes:
        raise lzma.LZMAError('Corrupt input data')

    monkeypatch.setattr(corpus, 'unpack', broken)
    (tmp_path / 'a.zip').write_bytes(b'x')
    assert 'a.zip: truncated or corrupt: Corrupt input data' in refused(['--data', str(tmp_path / 'a.zip')], capsys)


def test_download_of_another_archive_is_not_unpacked(tmp_path: Path, monkeypatch) -> None:
    def serve(url: str, part: Path) -> bool:
        with zipfile.ZipFile(part, 'w') as archive:
            archive.writestr('enwik8', b'short')
            archive.writestr('more', b'of it')
        return True

    monkeypatch.setattr(corpus, 'download', serve)
    monkeypatch.setattr(corpus, 'unpack', None)
    with pytest.raises(UserError, match='corrupt download, removed: a zip of'):
        corpus.find_enwik8(tmp_path, 'http://nowhere')
    assert list(tmp_path.iterdir()) == []


def test_network_is_used_only_for_the_text(text: Path, runs: Path, tmp_path: Path, capsys, monkeypatch) -> None:
    monkeypatch.setattr(corpus, 'DATA', tmp_path / 'none')
    monkeypatch.setattr(corpus.load_corpus, '__defaults__', (tmp_path / 'none', 'http://nowhere', 2**20))
    assert main(command(text, runs, steps=2)) == 0
    name, where = 'cpu-sparse-words.txt', ['--runs-dir', str(runs), '--device', 'cpu']
    text.unlink()  # not even the file is needed
    assert main(['--sample', str(runs / name), '--device', 'cpu', '--tokens', '3']) == 0
    assert main([*where, '--preset', 'cpu', '--check-decode']) == 0
    assert main([*where, '--name', name, '--check-decode']) == 0
    capsys.readouterr()
    for more in (['--name', name], ['--name', name, '--resume', '--dim', '32'], ['--kv-heads', '3', '--name', 'new']):
        refused([*where, *more], capsys)
    with pytest.raises(AssertionError, match='network'):
        main([*where, '--name', 'new'])
    torch.save(torch.load(runs / name / 'checkpoint.pt', weights_only=True), write := runs / 'other.pt')
    (runs / 'cpu-sparse-b').mkdir()
    write.rename(runs / 'cpu-sparse-b' / 'checkpoint.pt')
    line = refused([*where, '--preset', 'cpu', '--check-decode'], capsys)
    assert f'--name: needed, since there are cpu-sparse-b, {name}' in line


def test_traceback_is_shown_on_request(tmp_path: Path, capsys) -> None:
    arguments = ['--data', str(tmp_path / 'none'), '--name', 'one', '--device', 'cpu']
    refused(arguments, capsys)
    assert main([*arguments, '--traceback']) == 2
    printed = capsys.readouterr().err
    assert 'Traceback (most recent call last)' in printed
    assert printed.endswith('none: No such file or directory\n')


@pytest.mark.pictures
def test_compare(text: Path, runs: Path, capsys) -> None:
    for attention in ('sparse', 'dense'):
        assert main(command(text, runs, '--name', attention, attention=attention)) == 0
    printed = capsys.readouterr().out
    assert printed.count('--- continued ---') == 4  # each sample is printed
    assert 'below' in printed or 'above' in printed
    assert f'picture: {runs / "dense" / "loss.png"}' in printed
    assert f'--sample {runs / "dense"}' in printed
    with (runs / 'dense' / 'log.jsonl').open('a') as file:
        file.write('{"step": 1')  # a torn line is skipped
    both = [str(runs / 'sparse'), str(runs / 'dense')]
    assert main(['--runs-dir', str(runs), '--compare', *both]) == 0
    table = capsys.readouterr().out.splitlines()
    assert table[0].split()[:3] == ['run', 'attention', 'parameters']
    found = {line.split()[1]: line.split() for line in table[1:3]}
    log = read_rows(runs / 'dense')
    valid = [row['bpb'] for row in log if row.get('split') == 'valid']
    assert found['dense'][5:7] == [f'{min(valid):.4f}', f'{valid[-1]:.4f}']
    assert found['dense'][7] == f'{log[-1]["bpb"]:.4f}'
    assert (runs / 'compare.png').read_bytes().startswith(b'\x89PNG')
    sizes = {name: read_rows(runs / name)[0]['parameters'] for name in ('sparse', 'dense')}
    assert sizes['sparse']['total'] - sizes['dense']['total'] == sizes['sparse']['sparse only'] > 0
    assert sizes['dense']['sparse only'] == 0
    assert 0 < sizes['dense']['attention'] < sizes['dense']['total']
    assert '--dim: not with --compare' in refused(['--compare', *both, '--dim', '3'], capsys)
    assert 'no such log' in refused(['--compare', str(runs / 'none')], capsys)
    other = text.with_name('other.txt')
    other.write_bytes(text.read_bytes()[::-1])
    assert main(command(other, runs, '--name', 'other', steps=1)) == 0
    capsys.readouterr()
    assert 'different texts' in refused(['--compare', both[0], str(runs / 'other')], capsys)


def test_log_holds_yardsticks_and_growing_seconds(text: Path, runs: Path) -> None:
    assert main(command(text, runs, '--name', 'one', eval_bytes=0)) == 0
    log = rows(runs / 'one', timeless=False)
    seconds = [row['seconds'] for row in log]
    assert seconds == sorted(seconds)
    assert seconds[-1] > 0 == seconds[0]
    content = text.read_bytes()
    train, valid = content[:1800], content[1800:1900]
    found = {row['yardstick']: row for row in log if 'yardstick' in row}
    assert len(found) == 4
    assert found['gzip -9 of the test text']['bpb'] == 8 * len(gzip.compress(content[1900:], 9)) / 100
    packed, unigram = found['gzip -9 of the validation text'], found['unigram model of the validation text']
    assert packed['bpb'] == 8 * len(gzip.compress(valid, 9)) / 100
    assert (packed['bytes'], packed['bytes_of_split']) == (100, 100)
    shares = [(train.count(byte) + 1) / (1800 + 256) for byte in valid]
    assert unigram['bpb'] == pytest.approx(-sum(torch.tensor(shares).double().log2().tolist()) / 100)


def test_smoothed_is_a_running_mean() -> None:
    values = [float(n) for n in range(100)]
    assert plots.smoothed(values)[50] == pytest.approx(sum(range(41, 51)) / 10)
    assert plots.smoothed(values)[99] == pytest.approx(sum(range(80, 100)) / 20)
    assert plots.smoothed(values[:9]) == values[:9]


def test_old_log_is_refused_by_compare(tmp_path: Path, capsys) -> None:
    row = {'step': 1, 'split': 'valid', 'bpb': 2.0, 'corpus': 'x', 'bytes': 1, 'bytes_of_split': 1, 'config': {}}
    (tmp_path / 'log.jsonl').write_text(json.dumps(row) + '\n')
    assert 'no elapsed seconds' in refused(['--compare', str(tmp_path)], capsys)
