"""Train a byte-level language model with Native Sparse Attention on enwik8 and watch it learn to write.

    python train_enwik8.py                      minutes on a CPU (preset cpu), longer on a GPU (preset base)
    python train_enwik8.py --attention dense    the same model with full attention: lay the two curves over each other
    python train_enwik8.py --resume             the same command again: the run goes on where it stopped
    python train_enwik8.py --check-decode       decoding through the cache against the full forward, on the checkpoint
    python train_enwik8.py --sample runs/<name> --prompt 'The ' --tokens 2000    text by the checkpoint, as it comes

A run keeps all it writes in runs/<name>/: log.jsonl, loss.png, sample-<step>.txt, checkpoint.pt. Losses are bits per
byte. Validation and test predict each byte of their region but the first exactly once, in windows of --seq-len bytes
that do not overlap. data/README.md is about the text.
"""

from __future__ import annotations

import argparse
import codecs
import contextlib
import gzip
import hashlib
import http.client
import json
import math
import os
import platform
import signal
import sys
import sysconfig
import textwrap
import time
import urllib.error
import urllib.request
import zipfile
import zlib
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import Any, BinaryIO, NoReturn

import torch
from matplotlib.figure import Figure
from torch import Tensor, nn
from tqdm import tqdm

from native_sparse_attention import SparseAttention
from native_sparse_attention.transformer import Transformer

DATA = Path(__file__).parent / 'data'
ENWIK8_URL = 'http://mattmahoney.net/dc/enwik8.zip'
ENWIK8_BYTES = 100_000_000
ENWIK8_SHA256 = '2b49720ec4d78c3c9fabaee6e4179a5e997302b3a70029f30f2d582218c024a8'
STDLIB = f'python-{platform.python_version()}-stdlib'
STDLIB_MAX_BYTES = 32 * 2**20
LINE_SECONDS = 10  # at least, between two lines of progress where there is no bar
NETWORK_ERRORS = (urllib.error.URLError, http.client.HTTPException, TimeoutError, ConnectionError)


class UserError(Exception):
    """What the person at the keyboard can put right: printed in one line, exit code 2."""


@contextlib.contextmanager
def as_user_error(*kinds: type[Exception], of: str = '') -> Iterator[None]:
    try:
        yield
    except kinds as error:
        raise UserError(of + one_line(error)) from error


class Interrupted(Exception):
    """Ctrl-C or SIGTERM came, and the run stands between two steps."""


def flag(default: Any, text: str, least: float | None = None, **more: Any) -> Any:
    return field(default=default, metadata={'help': text, 'least': least, **more})


@dataclass(frozen=True)
class Config:
    """What a run is, saved with it and fixed for its life. Every field is a flag; the defaults are preset `base`."""

    attention: str = flag('sparse', 'the one thing in which the two models differ', choices=('sparse', 'dense'))
    dim: int = flag(512, 'width of the model', 1, model=True)
    depth: int = flag(6, 'layers', 1, model=True)
    heads: int = flag(8, 'query heads', 1, model=True)
    kv_heads: int = flag(4, 'key/value heads', 1, model=True)
    dim_head: int = flag(64, 'size of a head', 1, model=True)
    ff_expansion_factor: float = flag(4.0, 'hidden size of the feed-forward networks over --dim', 0, model=True)
    tie_embeddings: bool = flag(False, 'the output head is the token embedding', model=True)
    sliding_window_size: int = flag(64, 'tokens that the window branch reads', 1, sparse=True)
    compress_block_size: int = flag(16, 'length of a compressed block', 1, sparse=True)
    compress_block_sliding_stride: int = flag(8, 'distance between starts of compressed blocks', 1, sparse=True)
    selection_block_size: int = flag(16, 'length of a block that can be selected', 1, sparse=True)
    num_selected_blocks: int = flag(8, 'blocks that a query reads, forced ones included', 0, sparse=True)
    num_init_blocks: int = flag(1, 'forced blocks at the start', 0, sparse=True)
    num_local_blocks: int = flag(2, "forced blocks up to the query's own", 0, sparse=True)
    compress_mlp_expand_factor: float = flag(
        1.0, 'hidden size of the networks of blocks over a block', 0.01, sparse=True
    )
    num_compressed_mem_kv: int = flag(1, 'learned key/value pairs before the compressed ones', 0, sparse=True)
    use_diff_topk: bool = flag(True, 'teach the compressed branch what was worth selecting', sparse=True)
    seq_len: int = flag(1024, 'bytes of context', 1)
    batch: int = flag(16, 'sequences in a forward', 1)
    grad_accum: int = flag(1, 'forwards in a step', 1)
    steps: int = flag(20_000, 'optimizer steps', 1)
    lr: float = flag(6e-4, 'learning rate after the warm-up', 0)
    min_lr: float = flag(6e-5, 'learning rate at the end of the cosine', 0)
    warmup: int = flag(500, 'steps of linear warm-up', 0)
    weight_decay: float = flag(0.1, 'on weight matrices only', 0)
    beta1: float = flag(0.9, 'of AdamW', 0)
    beta2: float = flag(0.95, 'of AdamW', 0)
    clip: float = flag(1.0, 'largest norm of the gradient', 0)
    amp: bool = flag(True, 'bfloat16 autocast, on GPUs')
    threads: int = flag(0, 'of the CPU, 0: as many as torch takes; small models are hardly faster with more than 1', 0)
    seed: int = flag(0, 'of the weights, the order of the data and the samples', 0)
    log_every: int = flag(10, 'steps between lines of the log', 1)
    eval_every: int = flag(2000, 'steps between validations', 1)
    eval_bytes: int = flag(0, 'validate and test on so many bytes at the start of each split; 0: all', 0)
    save_every: int = flag(1000, 'steps between checkpoints', 1)
    sample_every: int = flag(2000, 'steps between samples; the last step writes one too', 1)
    sample_bytes: int = flag(512, 'length of a sample', 1)
    prompt_bytes: int = flag(128, 'bytes at the start of the validation split that a sample continues', 1)
    temperature: float = flag(1.0, 'of a sample', 0)
    top_p: float = flag(0.95, 'share of the probability that a sample draws from', 0)


PRESETS: dict[str, dict[str, Any]] = {
    'cpu': {
        'dim': 128, 'depth': 2, 'heads': 2, 'kv_heads': 1, 'dim_head': 32, 'sliding_window_size': 32,
        'compress_block_size': 8, 'compress_block_sliding_stride': 4, 'selection_block_size': 8,
        'num_selected_blocks': 5, 'seq_len': 256, 'batch': 2, 'steps': 1600, 'lr': 3e-3, 'min_lr': 2e-4, 'warmup': 100,
        'threads': 1, 'eval_every': 800, 'eval_bytes': 128 * 1024, 'save_every': 200, 'sample_every': 800,
        'sample_bytes': 256,
    },
    'base': {},
    'long': {
        'kv_heads': 1, 'sliding_window_size': 128, 'compress_block_size': 32, 'compress_block_sliding_stride': 16,
        'selection_block_size': 32, 'num_selected_blocks': 8, 'compress_mlp_expand_factor': 0.125,
        'seq_len': 16_384, 'batch': 4, 'grad_accum': 1, 'steps': 5000,
        'eval_every': 1000, 'save_every': 250, 'sample_every': 1000, 'prompt_bytes': 4096,
    },
}  # fmt: skip


WITH_SAMPLE = {'sample', 'prompt', 'tokens', 'backend', 'device', 'temperature', 'top_p', 'seed'}


class Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise UserError(f'{message} (see --help)')


def parse(argv: list[str] | None) -> tuple[argparse.Namespace, dict[str, Any]]:
    """The options of this call, and the fields of `Config` that it names."""
    parser = Parser('train_enwik8.py', description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument_group('this call').add_argument
    add('--preset', choices=PRESETS, help='the values that the flags below change (base on a GPU, else cpu)')
    add('--data', help="a file (.gz, .zip or raw), a folder, or 'stdlib', the sources of Python's library (enwik8)")
    add('--name', help='of the run (preset, attention and text)')
    add('--runs-dir', type=Path, default=Path('runs'), help='where runs are kept (%(default)s)')
    add('--resume', action='store_true', help='continue the run from its checkpoint, with its settings')
    add('--check-decode', action='store_true', help='train nothing: compare decoding with the full forward')
    add('--sample', type=Path, metavar='FOLDER', help='train nothing: print text by the model of runs/<name>')
    add('--prompt', help='what that text continues (a line break)')
    add('--tokens', type=int, metavar='N', help='bytes of that text (512)')
    add('--backend', default='auto', help='of sparse attention: auto, triton, flex, eager (%(default)s)')
    add('--device', default='cuda' if torch.cuda.is_available() else 'cpu', help='cuda or cpu (%(default)s)')
    add('--compile', action='store_true', help='through torch.compile')
    add('--graph', action=argparse.BooleanOptionalAction, default=True, help='replay steps as a CUDA graph, on GPUs')
    add('--wandb', action='store_true', help='log to Weights & Biases too')
    add = parser.add_argument_group('the run').add_argument
    for f in fields(Config):
        values = {preset: changes.get(f.name, f.default) for preset, changes in PRESETS.items()}
        differ = len(set(values.values())) > 1
        shown = ', '.join(f'{preset} {value}' for preset, value in values.items()) if differ else f.default
        kind: dict[str, Any] = {'type': type(f.default), 'choices': f.metadata.get('choices')}
        if isinstance(f.default, bool):
            kind = {'action': argparse.BooleanOptionalAction}
        elif not kind['choices']:
            kind['metavar'] = 'N' if isinstance(f.default, int) else 'X'
        add(spelled(f.name), default=argparse.SUPPRESS, help=f'{f.metadata["help"]} ({shown})', **kind)
    options = parser.parse_args(argv)
    if options.sample is None and (options.prompt is not None or options.tokens is not None):
        raise UserError('--prompt and --tokens: need --sample, the run that writes')
    changed = {name for name, value in vars(options).items() if value != parser.get_default(name)}
    if options.sample and (ignored := changed - WITH_SAMPLE):
        raise UserError(f'{", ".join(map(spelled, sorted(ignored)))}: not with --sample, which takes the run as it is')
    given = {f.name: vars(options).pop(f.name) for f in fields(Config) if f.name in options}
    for f in fields(Config):
        least = f.metadata['least']
        if f.name in given and least is not None and not given[f.name] >= least:
            raise UserError(f'{spelled(f.name)} {given[f.name]}: must be at least {least}')
    return options, given


def spelled(name: str) -> str:
    return '--' + name.replace('_', '-')


@dataclass(frozen=True)
class Corpus:
    name: str  # stands in every figure and file
    data: str  # the --data that finds it again
    sha256: str
    splits: dict[str, Tensor]  # train, valid, test: uint8 [bytes]


def load_corpus(data: str | None, folder: Path = DATA, url: str = ENWIK8_URL) -> Corpus:
    """What --data names; by default enwik8 from the folder or the network, or else the standard library."""
    data = data or find_enwik8(folder, url)
    if data == 'stdlib':
        name, content = STDLIB, read_stdlib()
    else:
        data = str(Path(data).resolve())
        name, content = Path(data).name.removesuffix('.gz').removesuffix('.zip'), read(Path(data))
    if not content:
        raise UserError(f'{data}: empty')
    sha256 = hashlib.sha256(content).hexdigest()
    if sha256 == ENWIK8_SHA256:
        name = 'enwik8'
    elif name == 'enwik8':
        raise UserError(f'{data}: truncated or corrupt: {unlike_enwik8(content)} (another text needs another name)')
    cuts = [len(content) * percent // 100 for percent in (90, 95)]  # of enwik8: 90, 5 and 5 million bytes
    splits = torch.frombuffer(bytearray(content), dtype=torch.uint8).tensor_split(cuts)
    return Corpus(name, data, sha256, dict(zip(('train', 'valid', 'test'), splits, strict=True)))


def read(path: Path, kind: str | None = None) -> bytes:
    """A file, unpacked if its kind (or suffix) is .gz or .zip; of a folder, all files but hidden ones, in order."""
    if path.is_dir():
        below = sorted(p.relative_to(path) for p in path.rglob('*') if p.is_file())
        return b''.join(read(path / p) for p in below if not any(part.startswith('.') for part in p.parts))
    try:
        if (kind or path.suffix) == '.gz':
            return gzip.decompress(path.read_bytes())
        if (kind or path.suffix) == '.zip':
            with zipfile.ZipFile(path) as archive:
                return b''.join(archive.read(name) for name in sorted(archive.namelist()))
    except (EOFError, zlib.error, gzip.BadGzipFile, zipfile.BadZipFile, NotImplementedError, RuntimeError) as error:
        raise UserError(f'{path}: truncated or corrupt: {one_line(error)}') from error
    return path.read_bytes()


def unlike_enwik8(content: bytes) -> str:
    found = hashlib.sha256(content).hexdigest()
    if found == ENWIK8_SHA256:
        return ''
    return f'{len(content):,} bytes, SHA-256 {found[:8]}…, where enwik8 has {ENWIK8_BYTES:,}, {ENWIK8_SHA256[:8]}…'


def read_stdlib() -> bytes:
    """The .py files of the standard library in sorted order, without tests and installed packages."""
    root = Path(sysconfig.get_path('stdlib'))
    left_out = {'site-packages', 'dist-packages', 'test', 'tests', 'idle_test'}
    below = sorted(p.relative_to(root) for p in root.rglob('*.py'))
    return b''.join((root / p).read_bytes() for p in below if not left_out & set(p.parts))[:STDLIB_MAX_BYTES]


def find_enwik8(folder: Path, url: str) -> str:
    """The file in the folder, downloaded if it is not there; 'stdlib', after a line that says so, without a network.

    A download that stopped is continued, now or by the next call, and gets its name once its content is checked.
    """
    for path in (folder / 'enwik8.gz', folder / 'enwik8.zip', folder / 'enwik8'):
        if path.is_file():
            return str(path)
    part = folder / 'enwik8.zip.part'
    folder.mkdir(exist_ok=True)
    try:
        while not download(url, part):
            pass
    except NETWORK_ERRORS as error:
        say(f"no network for {url} ({one_line(error)}): training on {STDLIB}, the sources of Python's standard library")
        return 'stdlib'
    try:
        wrong = unlike_enwik8(read(part, '.zip'))
    except UserError as error:
        wrong = str(error)
    if wrong:
        part.unlink()
        raise UserError(f'{url}: corrupt download, removed: {wrong} (try again, or name a text with --data)')
    return str(part.rename(folder / 'enwik8.zip'))


def download(url: str, part: Path, timeout: float = 10) -> bool:
    """Add to `part` what the server has behind its bytes; whether that was all, or the connection ended before.

    Raises one of NETWORK_ERRORS where it brought nothing.
    """
    have = part.stat().st_size if part.exists() else 0
    request = urllib.request.Request(url, headers={'Range': f'bytes={have}-'} if have else {})
    try:
        response = urllib.request.urlopen(request, timeout=timeout)
    except urllib.error.HTTPError as error:
        if have and error.code == http.HTTPStatus.REQUESTED_RANGE_NOT_SATISFIABLE:  # there is nothing behind them
            return True
        raise
    with response:
        start = have if response.status == http.HTTPStatus.PARTIAL_CONTENT else 0  # other servers begin again
        length = response.headers['Content-Length']
        total = start + int(length) if length else None
        with part.open('ab' if start else 'wb') as file, progress('enwik8.zip', total, start, 'B') as bar:
            with contextlib.suppress(*NETWORK_ERRORS):
                while chunk := response.read(2**16):
                    file.write(chunk)
                    bar.update(len(chunk))
            if file.tell() <= have:
                raise ConnectionError(f'the connection ended after {file.tell():,} bytes')
            return total is None or file.tell() >= total


def build_model(config: Config, backend: str, device: torch.device) -> Transformer:
    torch.manual_seed(config.seed)
    shape = {f.name: getattr(config, f.name) for f in fields(Config) if 'model' in f.metadata}
    sparse = {f.name: getattr(config, f.name) for f in fields(Config) if 'sparse' in f.metadata}
    use_sparse = config.attention == 'sparse'
    return Transformer(256, use_sparse_attn=use_sparse, sparse_attn_kwargs=sparse, backend=backend, **shape).to(device)


def build_optimizer(model: nn.Module, config: Config) -> torch.optim.Optimizer:
    """AdamW that decays weight matrices, and leaves norms, biases, memories and learned positions alone."""
    matrices = {name: p for name, p in model.named_parameters() if p.ndim >= 2 and name.endswith('weight')}
    others = [p for name, p in model.named_parameters() if name not in matrices]
    groups = [{'params': list(matrices.values())}, {'params': others, 'weight_decay': 0.0}]
    betas, decay, fused = (config.beta1, config.beta2), config.weight_decay, groups[0]['params'][0].is_cuda
    return torch.optim.AdamW(groups, config.lr, betas, weight_decay=decay, fused=fused)


def build(config: Config, options: argparse.Namespace) -> tuple[torch.device, Transformer]:
    torch.set_num_threads(config.threads or torch.get_num_threads())
    with as_user_error(RuntimeError, AssertionError, of=f'--device {options.device}: '):
        device = torch.device(options.device)
        torch.empty(0, device=device)
    with as_user_error(ValueError, RuntimeError):  # sizes that do not fit
        return device, build_model(config, options.backend, device)


def learning_rate(step: int, config: Config) -> float:
    """For the step after `step` done ones: linear warm-up to lr, then a cosine that ends at min_lr."""
    if step < config.warmup:
        return config.lr * (step + 1) / config.warmup
    part = (step - config.warmup) / max(1, config.steps - 1 - config.warmup)
    return config.min_lr + (config.lr - config.min_lr) * (1 + math.cos(math.pi * part)) / 2


def seeded(config: Config, use: str, step: int, device: torch.device | str = 'cpu') -> torch.Generator:
    """Depends on seed, use and step alone, so that a resumed run draws what an uninterrupted one draws."""
    return torch.Generator(device).manual_seed(zlib.crc32(f'{use} {config.seed} {step}'.encode()))


def draw(text: Tensor, config: Config, step: int) -> Tensor:
    """The data of a step from random places of uint8 text [N], int64 [grad_accum, batch, seq_len + 1]."""
    shape = (config.grad_accum, config.batch, 1)
    starts = torch.randint(len(text) - config.seq_len, shape, generator=seeded(config, 'data', step))
    return text[starts + torch.arange(config.seq_len + 1)].long()


def windows(text: Tensor, seq_len: int, batch: int) -> Iterator[Tensor]:
    """Cut uint8 text [N] into int64 [≤ batch, seq_len + 1] and a shorter rest; neighbours share one byte."""
    full = (len(text) - 1) // seq_len
    if full:
        for ids in text[: full * seq_len + 1].unfold(0, seq_len + 1, seq_len).split(batch):
            yield ids.long()
    if full * seq_len + 1 < len(text):
        yield text[full * seq_len :].long()[None]


class Graph:
    """A function of a tensor on a GPU, captured as it would run, and replayed.

    A step is more than a thousand launches, many of which take the host longer than the GPU. What the function leaves
    elsewhere, such as gradients, every replay writes anew, to the same places.
    """

    def __init__(self, function: Callable[[Tensor], Tensor], x: Tensor) -> None:
        self.input, self.graph = x.clone(), torch.cuda.CUDAGraph()
        with torch.cuda.device(x.device), torch.cuda.graph(self.graph):
            self.output = function(self.input)

    def __call__(self, x: Tensor) -> Tensor:
        self.input.copy_(x)
        self.graph.replay()
        return self.output.clone()


@dataclass
class Run:
    """A model in training, and the folder that it writes to."""

    config: Config
    preset: str
    folder: Path
    corpus: Corpus
    device: torch.device
    model: Transformer
    forward: Callable[..., Tensor]  # the model, or its compiled form
    optimizer: torch.optim.Optimizer
    step: int = 0  # steps done
    recent: list[Tensor] = field(default_factory=list)  # losses since the last training line of the log
    rows: list[dict[str, Any]] = field(default_factory=list)  # of the log
    finished: bool = False
    signals: list[int] = field(default_factory=list)  # received
    wandb: Any = None
    replays: bool = False  # all steps but the first, as a CUDA graph
    graph: Graph | None = None

    def train(self) -> None:
        """From wherever the run stands to its last validation and sample."""
        config, done, seconds, said = self.config, 0, 0.0, -math.inf
        with progress(self.folder.name, config.steps, self.step, 'step') as bar:
            while True:
                if self.due(config.eval_every):
                    self.evaluate('valid')
                    self.plot()
                if self.due(config.sample_every):
                    self.write_sample()
                if self.step == config.steps:
                    return
                started = time.perf_counter()
                self.train_step()
                bpb = torch.stack(self.recent).mean().item() / math.log(2) if self.due(config.log_every) else None
                done, seconds = done + 1, seconds + time.perf_counter() - started
                bar.update()
                if bpb is not None:
                    if not math.isfinite(bpb):
                        raise UserError(f'step {self.step}: the loss is {bpb} (a smaller --lr or --clip may help)')
                    bytes_per_step = config.grad_accum * config.batch * config.seq_len
                    rate, covered = done * bytes_per_step / seconds, len(self.recent) * bytes_per_step
                    lr = self.optimizer.param_groups[0]['lr']
                    self.log(split='train', bpb=bpb, bytes=covered, lr=lr, tokens_per_s=round(rate))
                    figures = f'{bpb:.3f} bits per byte, {rate:,.0f} tokens/s'
                    bar.set_postfix_str(figures)
                    if bar.disable and time.perf_counter() - said >= LINE_SECONDS:
                        say(f'step {self.step} of {config.steps}: train {figures}')
                        said = time.perf_counter()
                    self.recent, done, seconds = [], 0, 0.0
                if self.due(config.save_every):
                    self.save()
                self.stop_if_asked()

    def due(self, every: int) -> bool:
        return self.step == self.config.steps or (self.step > 0 and self.step % every == 0)

    def stop_if_asked(self) -> None:
        if self.signals:
            raise Interrupted

    def train_step(self) -> None:
        config = self.config
        self.model.train()
        for group in self.optimizer.param_groups:
            group['lr'] = learning_rate(self.step, config)
        ids = draw(self.corpus.splits['train'], config, self.step)
        if self.device.type == 'cuda':  # from pageable memory the copy would wait for the step before
            ids = ids.pin_memory().to(self.device, non_blocking=True)
        self.recent.append(self.differentiate(ids) if self.graph is None else self.graph(ids))
        nn.utils.clip_grad_norm_(self.model.parameters(), config.clip)
        self.optimizer.step()
        self.step += 1
        if self.graph is None:
            self.optimizer.zero_grad()
            if self.replays and self.step < config.steps:
                with as_user_error(RuntimeError, of='steps cannot be captured as a CUDA graph (see --no-graph): '):
                    self.graph = Graph(self.differentiate, ids)

    def differentiate(self, ids: Tensor) -> Tensor:
        """The loss of ids [grad_accum, batch, T + 1], whose gradients are left with the parameters."""
        losses = []
        for part in ids:
            loss = self.loss(part) / len(ids)
            loss.backward()
            losses.append(loss.detach())
        return torch.stack(losses).sum()

    def loss(self, ids: Tensor) -> Tensor:
        """Mean nats per predicted byte of ids [B, T + 1]."""
        with self.autocast():
            return self.forward(ids.to(self.device), return_loss=True)

    def autocast(self) -> torch.autocast:
        enabled = self.config.amp and self.device.type == 'cuda'
        return torch.autocast(self.device.type, torch.bfloat16, enabled=enabled)

    def backend(self) -> str | None:
        """What serves sparse attention in a training step, and why not what is faster; None for dense attention."""
        attention = next((m for m in self.model.modules() if isinstance(m, SparseAttention)), None)
        if attention is None:
            return None
        x = torch.empty(self.config.batch, self.config.seq_len, self.config.dim, device=self.device)
        with self.autocast():
            return str(attention.backend_for(x))

    def can_replay(self) -> bool:
        """Whether a step is the same launches every time, and reads nothing back."""
        is_compiled = self.forward is not self.model
        return self.device.type == 'cuda' and not is_compiled and self.backend() in (None, 'triton')

    @torch.no_grad()
    def evaluate(self, split: str) -> None:
        """Log and print the bits per byte of a split or of its first --eval-bytes, and which of the two it is."""
        whole, nats = self.corpus.splits[split], 0.0
        text = whole[: self.config.eval_bytes or None]
        self.model.eval()
        with progress(split, len(text) - 1, 0, 'B', leave=False) as bar:
            for ids in windows(text, self.config.seq_len, self.config.batch):
                self.stop_if_asked()
                nats += self.loss(ids).item() * ids[:, 1:].numel()
                bar.update(ids[:, 1:].numel())
        bpb = nats / math.log(2) / (len(text) - 1)
        self.log(split=split, bpb=bpb, bytes=len(text), bytes_of_split=len(whole))
        say(f'step {self.step}: {split} {bpb:.4f} bits per byte ({self.corpus.name}, {coverage(self.rows[-1])})')

    def prompt(self) -> Tensor:
        return self.corpus.splits['valid'][: self.config.prompt_bytes].long()[None].to(self.device)

    def generate(self, count: int) -> Tensor:
        generator = seeded(self.config, 'sample', self.step, self.device)
        settings = {'temperature': self.config.temperature, 'top_p': self.config.top_p, 'generator': generator}
        return self.model.generate(self.prompt(), count, **settings)

    def write_sample(self) -> None:
        ids = self.prompt(), self.generate(self.config.sample_bytes)
        given, new = (bytes(row[0].tolist()).decode(errors='replace') for row in ids)
        head = f'{self.folder.name}, step {self.step}: the validation text of {self.corpus.name} continued'
        text = f'{head}\n\n{given}\n--- continued ---\n{new}\n'
        with atomically(self.folder / f'sample-{self.step:06d}.txt') as file:
            file.write(text.encode())
        if self.step == self.config.steps:
            say(f'\n{text}')

    def log(self, **row: Any) -> None:
        """Add a line to log.jsonl. Every figure stands beside the text, the split and how many bytes it covers."""
        self.rows.append({'step': self.step, 'corpus': self.corpus.name, **row})
        with (self.folder / 'log.jsonl').open('a') as file:
            file.write(json.dumps(self.rows[-1]) + '\n')
        if self.wandb and 'bpb' in row:
            self.wandb.log({f'{row["split"]} bits per byte, {self.corpus.name}': row['bpb']}, step=self.step)

    def plot(self) -> None:
        figure = Figure(figsize=(8, 5), layout='constrained')
        title = f'{self.folder.name}: {self.config.attention} attention on {self.corpus.name}'
        axes = figure.add_subplot(xlabel='step', ylabel='bits per byte', title=title)
        train, valid = ([row for row in self.rows if row.get('split') == split] for split in ('train', 'valid'))
        axes.plot([row['step'] for row in train], [row['bpb'] for row in train], label='train')
        label = f'valid, {coverage(valid[-1])}'
        axes.plot([row['step'] for row in valid], [row['bpb'] for row in valid], 'o-', label=label)
        axes.legend()
        with atomically(self.folder / 'loss.png') as file:
            figure.savefig(file, format='png', dpi=120)

    def save(self) -> None:
        state = {
            'config': asdict(self.config),
            'preset': self.preset,
            'corpus': {'name': self.corpus.name, 'data': self.corpus.data, 'sha256': self.corpus.sha256},
            'model': self.model.state_dict(),
            'optimizer': self.optimizer.state_dict(),
            'random': torch.get_rng_state(),
            'random_cuda': torch.cuda.get_rng_state(self.device) if self.device.type == 'cuda' else None,
            **{name: getattr(self, name) for name in ('step', 'recent', 'rows', 'finished')},
        }
        with atomically(self.folder / 'checkpoint.pt') as file:
            torch.save(state, file)

    def restore(self, state: dict[str, Any]) -> None:
        """Stand where the checkpoint was written. Evaluations at that very step are repeated, so their lines go."""
        with as_user_error(RuntimeError, ValueError, of=f'{self.folder}/checkpoint.pt: of another shape: '):
            self.model.load_state_dict(state['model'])
            self.optimizer.load_state_dict(state['optimizer'])
        self.step, self.finished = state['step'], state['finished']
        self.recent = [loss.to(self.device) for loss in state['recent']]
        self.rows = [r for r in state['rows'] if r['step'] < self.step or r.get('split') in (None, 'train')]
        torch.set_rng_state(state['random'])
        if self.device.type == 'cuda' and state['random_cuda'] is not None:
            torch.cuda.set_rng_state(state['random_cuda'], self.device)

    def rehearse(self) -> None:
        """A forward, a backward and a generated byte: what this model cannot do is said before anything is written."""
        with as_user_error(ValueError, NotImplementedError), torch.random.fork_rng():
            self.loss(draw(self.corpus.splits['train'], self.config, self.step)[0]).backward()
            self.generate(1)
        self.optimizer.zero_grad()


def coverage(row: dict[str, Any]) -> str:
    part = 'all' if row['bytes'] == row['bytes_of_split'] else f'first {row["bytes"]:,} of'
    return f'{part} {row["bytes_of_split"]:,} bytes'


@contextlib.contextmanager
def atomically(path: Path) -> Iterator[BinaryIO]:
    """A file that takes the place of `path` once all of it is on the disk."""
    part = path.with_name(path.name + '.part')
    with part.open('wb') as file:
        yield file
        file.flush()
        os.fsync(file.fileno())
    os.replace(part, path)


def load_checkpoint(folder: Path) -> dict[str, Any]:
    path = folder / 'checkpoint.pt'
    if not path.is_file():
        others = ', '.join(sorted(p.parent.name for p in folder.parent.glob('*/checkpoint.pt'))) or 'none'
        raise UserError(f'{path}: no such checkpoint (runs that have one: {others})')
    try:
        state = torch.load(path, map_location='cpu', weights_only=True)
        return {**state, 'config': Config(**state['config'])}
    except Exception as error:  # of whatever kind the unpickler finds for what stands there
        raise UserError(f'{path}: truncated, corrupt or of another version: {one_line(error)}') from error


def open_run(options: argparse.Namespace, given: dict[str, Any]) -> Run:
    """A new run that has written nothing yet, or with --resume or --check-decode the one that a checkpoint holds."""
    old = options.resume or options.check_decode
    state = load_checkpoint(options.runs_dir / options.name) if old and options.name else None
    corpus = load_corpus(options.data or (state['corpus']['data'] if state else None))
    preset = options.preset or (state['preset'] if state else 'base' if torch.cuda.is_available() else 'cpu')
    config = Config(**{**PRESETS[preset], **given})
    folder = options.runs_dir / (options.name or f'{preset}-{config.attention}-{corpus.name}')
    if old:
        state = state or load_checkpoint(folder)
        refuse_changes(folder, state, {'preset': preset, **given}, corpus)
        config = state['config']
    elif os.path.lexists(folder):
        raise UserError(f'{folder}: exists already (--resume continues it, --name starts another run)')
    refuse_short(corpus, config)
    device, model = build(config, options)
    with as_user_error(ValueError):
        optimizer = build_optimizer(model, config)
    forward = torch.compile(model) if options.compile else model
    run = Run(config, preset, folder, corpus, device, model, forward, optimizer)
    run.replays = options.graph and run.can_replay()
    if state:
        run.restore(state)
    return run


def refuse_changes(folder: Path, state: dict[str, Any], asked: dict[str, Any], corpus: Corpus) -> None:
    held, text = {**asdict(state['config']), 'preset': state['preset']}, state['corpus']
    for name, value in asked.items():
        if value != held[name]:
            raise UserError(f'{spelled(name)} {value}: {folder} has {held[name]}, and a run keeps its settings')
    if corpus.sha256 != text['sha256']:
        raise UserError(f'{corpus.data}: {folder} reads another text, {text["name"]} (--data {text["data"]})')


def refuse_short(corpus: Corpus, config: Config) -> None:
    needed = {'train': config.seq_len + 1, 'valid': 2, 'test': 2}
    for split, text in corpus.splits.items():
        size = len(text if split == 'train' else text[: config.eval_bytes or None])
        if size < needed[split]:
            why = f'--seq-len {config.seq_len}' if split == 'train' else 'an evaluation'
            raise UserError(f'{corpus.data}: {size:,} bytes in split {split}, but {why} needs {needed[split]:,}')


def carry_out(run: Run, resumed: bool, to_wandb: bool) -> int:
    """Train from where the run stands to the end, test, and return the exit code."""
    if run.finished:
        raise UserError(f'{run.folder}: finished after {run.step} steps (--name starts another run)')
    run.rehearse()
    if to_wandb:
        try:
            import wandb  # pyright: ignore[reportMissingImports]
        except ImportError as error:
            raise UserError('--wandb: wandb is not installed (pip install wandb)') from error
        settings = {'id': run.folder.name, 'resume': 'allow', 'config': asdict(run.config)}
        run.wandb = wandb.init(project='native-sparse-attention', **settings)
    if resumed:
        with atomically(run.folder / 'log.jsonl') as file:  # without what was logged after the checkpoint
            file.writelines(json.dumps(row).encode() + b'\n' for row in run.rows)
    else:
        run.folder.mkdir(parents=True)
        run.log(preset=run.preset, config=asdict(run.config), torch=str(torch.__version__), backend=run.backend())
        run.save()
    size, length = sum(p.numel() for p in run.model.parameters()), len(run.corpus.splits['train'])
    what = f'{run.config.attention} attention, {size:,} parameters, {length:,} bytes of {run.corpus.name} to train on'
    say(f'{run.folder}: {what}, {run.device}, from step {run.step} to {run.config.steps}')
    if run.backend():
        say(f'{run.folder}: attention by {run.backend()}')
    note_signals(run.signals)
    try:
        run.train()
        run.evaluate('test')
        run.finished = True
    except Interrupted:
        say(f'{run.folder}: interrupted and saved at step {run.step} (the same command with --resume goes on)')
    run.save()
    return 0 if run.finished else 128 + run.signals[0]


def note_signals(received: list[int]) -> None:
    """The first Ctrl-C or SIGTERM is noted, so that the run can save; the next one ends the process."""

    def note(number: int, _: Any) -> None:
        received.append(number)
        for each in (signal.SIGINT, signal.SIGTERM):
            signal.signal(each, signal.SIG_DFL)

    for each in (signal.SIGINT, signal.SIGTERM):
        signal.signal(each, note)


@torch.no_grad()
def check_decode(run: Run, exact: bool) -> int:
    """Compare decoding through the cache with the full forward; returns the exit code.

    Logits are compared on random bytes, fed one by one: text that repeats itself has blocks of equal score, between
    which rounding chooses, one way in a forward over all and another in decoding. What `generate` writes greedily must
    be the likeliest by the full forward, or as good as that. exact: in float64, which kernels may not serve.
    """
    model, tolerance = (run.model.double(), 1e-9) if exact else (run.model, 1e-2)
    model.eval()
    prompt, count = run.prompt(), run.config.sample_bytes
    length = prompt.shape[1]
    generator = seeded(run.config, 'check', 0)
    ids = torch.randint(256, (1, length + count), generator=generator).to(run.device)
    full = model(ids)[:, length - 1 :]
    logits, cache = model(ids[:, :length], return_cache=True)
    steps = [logits[:, -1:]] + [model(new, cache=cache) for new in ids[:, length:].split(1, dim=1)]
    error = ((torch.cat(steps, 1) - full).abs().max() / full.abs().max()).item()
    new = model.generate(prompt, count, temperature=0)
    full = model(torch.cat((prompt, new), 1))[:, length - 1 : -1]
    lost = full.amax(-1) - full.gather(-1, new[..., None])[..., 0]
    passed = error <= tolerance and bool((lost <= 1e-2 * full.abs().max()).all())
    verdict = 'agrees with' if passed else 'DIFFERS from'
    found = f'logits to {error:.1e} of the largest ({tolerance:.0e} allowed)'
    found += f', {int((lost == 0).sum())} of {count} greedy bytes'
    say(f'{run.folder}, step {run.step}, {run.corpus.name}: decoding {verdict} the full forward: {found}')
    return 0 if passed else 1


def sample(options: argparse.Namespace, given: dict[str, Any]) -> int:
    """Print what the model of a checkpoint writes after --prompt, byte by byte, and how fast; returns the exit code.

    On a GPU in bfloat16, as the run was trained.
    """
    prompt = b'\n' if options.prompt is None else os.fsencode(options.prompt)
    count = 512 if options.tokens is None else options.tokens
    if not prompt:
        raise UserError('--prompt: must have at least 1 byte')
    if count < 1:
        raise UserError(f'--tokens {count}: must be at least 1')
    state = load_checkpoint(options.sample)
    config = replace(state['config'], **given)
    device, model = build(config, options)
    with as_user_error(RuntimeError, of=f'{options.sample}/checkpoint.pt: of another shape: '):
        model.load_state_dict(state['model'])
    if config.amp and device.type == 'cuda':
        model.bfloat16()
    decoder = codecs.getincrementaldecoder('utf-8')(errors='replace')  # holds back the start of a character
    times = [time.perf_counter()]

    def show(tokens: Tensor) -> None:
        new = bytes(tokens.tolist())
        times.append(time.perf_counter())
        print(decoder.decode(prompt + new if len(times) == 2 else new), end='', flush=True)

    settings = {'temperature': config.temperature, 'top_p': config.top_p, 'seed': config.seed, 'callback': show}
    with as_user_error(ValueError, NotImplementedError):
        model.generate(torch.tensor([list(prompt)], device=device), count, **settings)
    print(decoder.decode(b'', final=True))
    start, first, last = times[0], times[1], times[-1]
    speed = f', then {(count - 1) / (last - first):,.0f} tokens/s' if count > 1 else ''
    print(f'{options.sample}: {count:,} tokens, the first after {first - start:.2f} s{speed}', file=sys.stderr)
    return 0


def say(text: str) -> None:
    tqdm.write(text)
    sys.stdout.flush()  # a pipe would hold it back


def progress(name: str, total: int | None, done: int, unit: str, leave: bool = True) -> tqdm:
    """A bar, disabled where stderr is no terminal."""
    scale = unit == 'B'
    return tqdm(desc=name, total=total, initial=done, unit=unit, unit_scale=scale, leave=leave, disable=None)


def one_line(error: BaseException) -> str:
    return textwrap.shorten(str(error), 240, placeholder=' …') or type(error).__name__


def main(argv: list[str] | None = None) -> int:
    """Exit code 0; 1 if --check-decode finds a difference; 2 for what the user can put right; 128 + n on signal n."""
    try:
        options, given = parse(argv)
        if options.sample:
            return sample(options, given)
        run = open_run(options, given)
        if options.check_decode:
            return check_decode(run, exact=options.backend in ('auto', 'eager'))
        return carry_out(run, options.resume, options.wandb)
    except UserError as error:
        message = str(error)
    except OSError as error:
        message = f'{error.filename}: {error.strerror}' if error.filename else one_line(error)
    except KeyboardInterrupt:
        return 128 + signal.SIGINT
    print(f'train_enwik8.py: {message}', file=sys.stderr)
    return 2


if __name__ == '__main__':
    sys.exit(main())
