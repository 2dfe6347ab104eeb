"""The text of the trainer: its sources, refusals, and continued downloads."""

import gzip
import hashlib
import http.server
import threading
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import cast

import pytest
import torch

from trainer import corpus as corpus_module
from trainer.console import UserError
from trainer.corpus import STDLIB, Corpus, find_enwik8, load_corpus

TEXT = bytes(range(256)) * 400 + b'the end'
NOWHERE = 'http://127.0.0.1:1/enwik8.zip'  # nothing listens there


def zipped(path: Path, content: bytes = TEXT) -> bytes:
    with zipfile.ZipFile(path, 'w', zipfile.ZIP_STORED) as archive:
        archive.writestr(zipfile.ZipInfo('enwik8'), content)
    return path.read_bytes()


def whole(corpus: Corpus) -> bytes:
    return bytes(torch.cat(list(corpus.splits.values())).tolist())


@pytest.fixture
def enwik8(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make the trainer take TEXT for enwik8."""
    monkeypatch.setattr(corpus_module, 'ENWIK8_BYTES', len(TEXT))
    monkeypatch.setattr(corpus_module, 'ENWIK8_SHA256', hashlib.sha256(TEXT).hexdigest())


class Server(http.server.ThreadingHTTPServer):
    """Serves `body`, in answers of at most `limit` bytes whose headers promise all of it."""

    body = b''
    limit = 10**9
    ranges = True
    status = 200

    def __init__(self) -> None:
        super().__init__(('127.0.0.1', 0), Handler)
        self.asked: list[str | None] = []

    @property
    def url(self) -> str:
        return f'http://127.0.0.1:{self.server_port}/enwik8.zip'


class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        server, wanted = cast(Server, self.server), self.headers['Range']
        server.asked.append(wanted)
        start = int(wanted.removeprefix('bytes=').removesuffix('-')) if wanted and server.ranges else 0
        if server.status != 200:
            self.send_error(server.status)
        elif start >= len(server.body):
            self.send_error(416)
        else:
            self.send_response(206 if start else 200)
            self.send_header('Content-Length', str(len(server.body) - start))
            self.end_headers()
            self.wfile.write(server.body[start : start + server.limit])

    def log_message(self, format: str, *args: object) -> None:
        pass


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Server]:
    with Server() as server:
        server.body = zipped(tmp_path / 'served.zip')
        threading.Thread(target=server.serve_forever, kwargs={'poll_interval': 0.01}, daemon=True).start()
        yield server
        server.shutdown()


@pytest.mark.usefixtures('enwik8')
class TestDownload:
    def test_whole(self, server: Server, tmp_path: Path) -> None:
        corpus = load_corpus(None, tmp_path / 'data', server.url)
        assert corpus.name == 'enwik8'
        assert whole(corpus) == TEXT
        assert [p.name for p in (tmp_path / 'data').iterdir()] == ['enwik8.zip']
        assert server.asked == [None]
        assert load_corpus(None, tmp_path / 'data', NOWHERE).data == corpus.data  # not fetched again

    def test_download_continues_after_an_earlier_call(self, server: Server, tmp_path: Path) -> None:
        (tmp_path / 'enwik8.zip.part').write_bytes(server.body[:1000])
        find_enwik8(tmp_path, server.url)
        assert server.asked == ['bytes=1000-']
        assert (tmp_path / 'enwik8.zip').read_bytes() == server.body

    def test_goes_on_when_the_connection_ends(self, server: Server, tmp_path: Path) -> None:
        server.limit = 40_000
        find_enwik8(tmp_path, server.url)
        assert server.asked == [None, 'bytes=40000-', 'bytes=80000-']
        assert (tmp_path / 'enwik8.zip').read_bytes() == server.body

    def test_server_that_cannot_continue_begins_again(self, server: Server, tmp_path: Path) -> None:
        server.ranges = False
        (tmp_path / 'enwik8.zip.part').write_bytes(b'x' * 1000)
        find_enwik8(tmp_path, server.url)
        assert (tmp_path / 'enwik8.zip').read_bytes() == server.body

    def test_all_was_there_already(self, server: Server, tmp_path: Path) -> None:
        (tmp_path / 'enwik8.zip.part').write_bytes(server.body)
        find_enwik8(tmp_path, server.url)
        assert (tmp_path / 'enwik8.zip').read_bytes() == server.body

    @pytest.mark.parametrize(
        'spoil',
        [
            lambda body, folder: body[: len(body) // 2],  # the server itself has only half
            lambda body, folder: body[:5000] + b'x' + body[5001:],  # one byte of the content
            lambda body, folder: b'<html>log in first</html>',
            lambda body, folder: zipped(folder / 'other.zip', TEXT + b'more'),
        ],
        ids=['truncated', 'flipped', 'portal', 'other'],
    )
    def test_corrupt_is_refused_and_removed(self, server: Server, tmp_path: Path, spoil) -> None:
        server.body = spoil(server.body, tmp_path)
        with pytest.raises(UserError, match='corrupt download, removed') as error:
            find_enwik8(tmp_path / 'data', server.url)
        assert '\n' not in str(error.value)
        assert list((tmp_path / 'data').iterdir()) == []

    def test_dead_connection_keeps_received_bytes(self, server: Server, tmp_path: Path, capsys) -> None:
        server.limit = 0
        (tmp_path / 'enwik8.zip.part').write_bytes(server.body[:1000])
        assert find_enwik8(tmp_path, server.url) == 'stdlib'
        assert (tmp_path / 'enwik8.zip.part').read_bytes() == server.body[:1000]

    @pytest.mark.parametrize('status', [403, 404, 500])
    def test_refusing_server_is_no_network(self, server: Server, tmp_path: Path, status: int) -> None:
        server.status = status
        assert find_enwik8(tmp_path, server.url) == 'stdlib'


def test_without_network_the_standard_library(tmp_path: Path, capsys) -> None:
    corpus = load_corpus(None, tmp_path, NOWHERE)
    printed = capsys.readouterr().out
    assert printed.count('\n') == 1
    assert NOWHERE in printed
    assert STDLIB in printed
    assert (corpus.name, corpus.data) == (STDLIB, 'stdlib')
    assert list(tmp_path.iterdir()) == []
    assert b'class ArgumentParser' in corpus_module.read_stdlib()
    assert sum(map(len, corpus.splits.values())) > 5 * 10**6
    assert load_corpus('stdlib').sha256 == corpus.sha256


@pytest.mark.usefixtures('enwik8')
@pytest.mark.parametrize('suffix', ['.gz', '.zip', ''])
def test_enwik8_in_the_data_folder(tmp_path: Path, suffix: str) -> None:
    path = tmp_path / f'enwik8{suffix}'
    if suffix == '.zip':
        zipped(path)
    else:
        path.write_bytes(gzip.compress(TEXT) if suffix else TEXT)
    corpus = load_corpus(None, tmp_path, NOWHERE)
    assert (corpus.name, corpus.data) == ('enwik8', str(path))
    assert whole(corpus) == TEXT


def test_named_files_and_folders(tmp_path: Path) -> None:
    folder = tmp_path / 'texts'
    (folder / 'b').mkdir(parents=True)
    (folder / '.git').mkdir()
    (folder / '.git' / 'config').write_bytes(b'hidden')
    (folder / 'b' / 'second.txt').write_bytes(TEXT[1000:])
    (folder / 'a.txt.gz').write_bytes(gzip.compress(TEXT[:1000]))
    (tmp_path / 'raw.txt').write_bytes(TEXT)
    zipped(tmp_path / 'packed.txt.zip')
    for data, name in (('texts', 'texts'), ('raw.txt', 'raw.txt'), ('packed.txt.zip', 'packed.txt')):
        corpus = load_corpus(str(tmp_path / data))
        assert (corpus.name, whole(corpus)) == (name, TEXT)


@pytest.mark.parametrize('length', [100, 101, 119, 10_007])
def test_split_is_90_5_5(tmp_path: Path, length: int) -> None:
    (tmp_path / 'text').write_bytes(TEXT[:length])
    corpus = load_corpus(str(tmp_path / 'text'))
    sizes = [len(split) for split in corpus.splits.values()]
    assert sum(sizes) == length
    assert sizes[0] == length * 90 // 100
    assert sizes[1] == length * 95 // 100 - sizes[0]


@pytest.mark.parametrize(
    ('name', 'content', 'message'),
    [
        ('a.txt', b'', 'a.txt: empty'),
        ('a.gz', gzip.compress(TEXT)[:-20], 'a.gz: truncated or corrupt'),
        ('a.gz', b'not packed at all', 'a.gz: truncated or corrupt'),
        ('a.gz', gzip.compress(TEXT)[:40] + b'xyz' + gzip.compress(TEXT)[43:], 'a.gz: truncated or corrupt'),
        ('a.zip', b'not packed at all', 'a.zip: truncated or corrupt'),
        ('enwik8', TEXT[:1000], r'enwik8: truncated or corrupt: 1,000 bytes.* enwik8 has 100,000,000'),
        ('enwik8.gz', gzip.compress(TEXT), 'enwik8.gz: truncated or corrupt'),
    ],
)
def test_bad_files_are_refused(tmp_path: Path, name: str, content: bytes, message: str) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(UserError, match=message) as error:
        load_corpus(str(tmp_path / name))
    assert '\n' not in str(error.value)
    assert (tmp_path / name).read_bytes() == content


def test_truncated_zip_is_refused(tmp_path: Path) -> None:
    (tmp_path / 'a.zip').write_bytes(zipped(tmp_path / 'whole.zip')[:-30])
    with pytest.raises(UserError, match=r'a\.zip: truncated or corrupt'):
        load_corpus(str(tmp_path / 'a.zip'))
