"""One run of `benchmarks.learning`: a variant and a seed, from the start or a checkpoint to its end."""

from __future__ import annotations

import gc
import json
import math
import time
import traceback
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks import learning_data
from benchmarks.learning_probes import gate_means, probe_layers
from benchmarks.learning_variants import VARIANTS, Variant, build, count, count_sparse_only, not_supported, role
from native_sparse_attention import SparseAttention
from native_sparse_attention.nn.transformer import Transformer
from train_enwik8 import Config, build_optimizer, learning_rate, windows
from trainer.batches import draw_starts
from trainer.folder import atomically
from trainer.graph import build_ahead
from trainer.record import sparse_backend

LINE_SECONDS = 10  # at least, between two lines of progress
BUCKETS = (0, 128, 512, 1024, 2048, 4096, 16_384, 65_536, 262_144)  # borders, in tokens


@dataclass(frozen=True)
class Settings:
    """Settings that all runs of one call share."""

    config: dict[str, Any]  # of train_enwik8.Config; the seed is that of a run
    sparse: dict[str, Any]  # of SparseAttention
    text: dict[str, Any]  # of learning_data.prepare
    eval_bytes: int
    evals: int
    save_every: int
    probe_rows: int
    backend: str
    device: str
    graph: bool

    def as_run(self) -> dict[str, Any]:
        """Return the settings that a resumed run and compared runs must share."""
        left_out = ('save_every', 'device', 'graph', 'backend')
        facts = {name: value for name, value in asdict(self).items() if name not in left_out}
        return {**facts, 'text': {name: value for name, value in self.text.items() if name != 'path'}}


def job_name(variant: str, seed: int) -> str:
    return f'{variant}-seed{seed}'


def eval_steps(steps: int, evals: int) -> list[int]:
    """Return step 0 and `evals` more steps in geometric progression, the last one `steps`."""
    first = min(steps, max(1, steps // 32))
    factor = (steps / first) ** (1 / max(1, evals - 1))
    return sorted({0, steps, *(round(first * factor**place) for place in range(evals))})


class Training:
    """A model, its optimizer and the record of the run, which becomes its JSON."""

    def __init__(self, variant: str, seed: int, settings: Settings, out: Path, say: Callable[[str], None]) -> None:
        reason = not_supported(variant)
        if reason:
            raise ValueError(f'{variant}: {reason}')
        self.name, self.settings, self.out, self.say = job_name(variant, seed), settings, out, say
        self.variant: Variant = VARIANTS[variant]
        self.config = Config(**{**settings.config, 'seed': seed, 'attention': self.variant.kind})
        self.device = torch.device(settings.device)
        shape = {f: getattr(self.config, f) for f in ('dim', 'depth', 'heads', 'kv_heads', 'dim_head')}
        shape['ff_expansion_factor'] = self.config.ff_expansion_factor
        seq_len = self.config.seq_len
        model = build(variant, shape, settings.sparse, seq_len, seed, settings.backend)
        self.model: Transformer = model.to(self.device)
        self.optimizer = make_optimizer(model, self.config, self.variant)
        self.splits = learning_data.load(settings.text['path'], settings.text['bytes'])
        if len(self.splits['train']) <= seq_len or len(self.splits['valid']) < 2:
            raise ValueError(f'the text has {settings.text["bytes"]} bytes, too few for sequences of {seq_len}')
        self.step = 0
        self.seconds, self.is_warm = 0.0, False
        self.dense_steps, self.is_dense = round(self.variant.dense_share * self.config.steps), False
        x = torch.empty(self.config.batch, seq_len, self.config.dim, device=self.device)
        with self.autocast():
            backend = sparse_backend(model, x)
        self.record: dict[str, Any] = {
            'variant': variant,
            'seed': seed,
            'about': self.variant.about,
            'settings': settings.as_run(),
            'parameters': count(model),
            'parameters_sparse_only': count_sparse_only(model),
            'backend': backend,
            'gpu': torch.cuda.get_device_name(self.device) if self.device.type == 'cuda' else 'cpu',
            'torch': str(torch.__version__),
            'train': [],
            'valid': [],
            'gates': [],
        }
        self.replays = (
            settings.graph and self.device.type == 'cuda' and (backend is None or backend.startswith('triton'))
        )
        self._prepare_steps()

    @property
    def checkpoint(self) -> Path:
        return self.out / 'checkpoints' / f'{self.name}.pt'

    @property
    def result(self) -> Path:
        return self.out / f'{self.name}.json'

    def autocast(self) -> torch.autocast:
        enabled = self.config.amp and self.device.type == 'cuda'
        return torch.autocast(self.device.type, torch.bfloat16, enabled=enabled)

    def _prepare_steps(self) -> None:
        """Put text, starts and learning rates on the device, so that a step is a few copies and one graph."""
        config, train = self.config, self.splits['train']
        self.text = train.to(self.device)
        starts = [draw_starts(len(train), config, step) for step in range(config.steps)]
        self.starts = torch.stack(starts).to(self.device)
        self.offsets = torch.arange(config.seq_len + 1, device=self.device)
        rates = torch.tensor([learning_rate(step, config) for step in range(config.steps)], device=self.device)
        self.rates, self.at = rates, torch.zeros_like(self.starts[0])
        self.loss_sum = torch.zeros((), device=self.device)
        self.graph: torch.cuda.CUDAGraph | None = None
        if self.device.type == 'cuda':
            for group in self.optimizer.param_groups:
                group['lr'], group['capturable'] = torch.zeros((), device=self.device), True

    def train(self, is_over: Callable[[], bool]) -> bool:
        """Train until the end or until is_over() is true, and save. Returns True at the end."""
        self.restore()
        config, log_every = self.config, max(1, self.config.steps // 200)
        evals, said = eval_steps(config.steps, self.settings.evals), -math.inf
        self.model.train()
        build_ahead(self._losses, self._losses, self.starts[0][0])
        while True:
            self._set_window(self.step < self.dense_steps)
            if self.step in evals and not any(row['step'] == self.step for row in self.record['valid']):
                self.evaluate()
            if self.step == config.steps:
                break
            if is_over():
                self.save()
                return False
            ends = (s for s in sorted({*evals, self.dense_steps}) if s > self.step)
            stop = min(self.step + log_every - self.step % log_every, next(ends))
            first, started, counted = self.step, time.perf_counter(), 0
            while self.step < stop:
                if not self.is_warm and self.step > first:
                    self.loss_sum.item()  # waits for the first step, which compiled kernels
                    if self.replays:
                        self._capture()
                    self.is_warm, started, counted = True, time.perf_counter(), 0
                self._train_step()
                counted += 1
            loss = self.loss_sum.item() / (stop - first)
            self.loss_sum.zero_()
            # The first step, which compiles kernels, counts as one of average length.
            took = (time.perf_counter() - started) * (stop - first) / counted
            self.seconds += took
            if not math.isfinite(loss):
                raise ValueError(f'{self.name}: the loss is {loss} at step {stop}')
            bpb, rate = loss / math.log(2), (stop - first) * self.tokens_per_step / took
            self.record['train'].append({'step': stop, 'seconds': self.seconds, 'bpb': bpb})
            if time.perf_counter() - said >= LINE_SECONDS:
                valid = self.record['valid'][-1]
                figures = f'train {bpb:.4f}, valid {valid["bpb"]:.4f} at {valid["step"]}, {rate:,.0f} tokens/s'
                self.say(f'{self.name}: step {stop}/{config.steps}, {figures}')
                said = time.perf_counter()
            if self.settings.save_every and stop % self.settings.save_every < stop - first and stop < config.steps:
                self.save()
        self.finish()
        return True

    @property
    def tokens_per_step(self) -> int:
        return self.config.batch * self.config.grad_accum * self.config.seq_len

    def _train_step(self) -> None:
        self.at.copy_(self.starts[self.step])
        for group in self.optimizer.param_groups:
            rate = self.rates[self.step] * group.get('lr_scale', 1.0)
            if self.device.type == 'cuda':
                group['lr'].copy_(rate)
            else:
                group['lr'] = rate.item()
        if self.graph is None:
            self._differentiate_and_update()
            self.optimizer.zero_grad()
        else:
            self.graph.replay()
        self.step += 1

    def _differentiate_and_update(self) -> None:
        for part in self.at:
            loss, total = self._losses(part)
            (total / len(self.at)).backward()
            self.loss_sum += loss.detach() / len(self.at)
        nn.utils.clip_grad_norm_(self.model.parameters(), self.config.clip)
        self.optimizer.step()

    def _losses(self, part: Tensor) -> tuple[Tensor, Tensor]:
        """Return the loss of sequences that start at `part`, and the sum that is trained."""
        ids, weight = self.text[part + self.offsets].long(), self.variant.block_loss
        with self.autocast():
            if not weight:
                loss = self.model(ids, return_loss=True)
                return loss, loss
            loss, block_loss = self.model(ids, return_loss=True, return_block_loss=True)
        return loss, loss + weight * block_loss

    def _set_window(self, is_dense: bool) -> None:
        """Let the window of all sparse layers cover the sequence, or be that of the variant."""
        if is_dense == self.is_dense:
            return
        own = self.variant.settings.get('sliding_window_size', self.settings.sparse['sliding_window_size'])
        for module in self.model.modules():
            if isinstance(module, SparseAttention):
                module.sliding_window_size = self.config.seq_len if is_dense else own
        self.is_dense, self.graph, self.is_warm = is_dense, None, False

    def _capture(self) -> None:
        torch.cuda.synchronize()
        self.graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self.graph):
            self._differentiate_and_update()

    @torch.no_grad()
    def nats_by_position(self, split: str) -> tuple[Tensor, Tensor]:
        """Return sums of nats and numbers of bytes at each position of a sequence, float64 `[T]`."""
        config = self.config
        nats, counts = torch.zeros(2, config.seq_len, dtype=torch.float64, device=self.device)
        text = self.splits[split][: self.settings.eval_bytes].to(self.device)
        self.model.eval()
        for ids in windows(text, config.seq_len, config.batch):
            with self.autocast():
                logits = self.model(ids[:, :-1])
            losses = F.cross_entropy(logits.float().flatten(0, 1), ids[:, 1:].flatten(), reduction='none')
            losses = losses.view(ids[:, 1:].shape)
            nats[: losses.shape[1]] += losses.double().sum(0)
            counts[: losses.shape[1]] += len(losses)
        self.model.train()
        return nats.cpu(), counts.cpu()

    def evaluate(self) -> None:
        nats, counts = self.nats_by_position('valid')
        bpb = bits_per_byte(nats, counts)
        self.record['valid'].append({'step': self.step, 'seconds': self.seconds, 'bpb': bpb})
        self.record['gates'].append({'step': self.step, **gate_means(self.model, self.probe_ids(), self.autocast)})

    def probe_ids(self) -> Tensor:
        rows, length = self.settings.probe_rows, self.config.seq_len + 1
        text = self.splits['valid']
        rows = max(1, min(rows, len(text) // length))
        return text[: rows * length].view(rows, -1).long().to(self.device)

    def finish(self) -> None:
        for split in ('valid', 'test'):
            nats, counts = self.nats_by_position(split)
            self.record[f'final_{split}'] = bits_per_byte(nats, counts)
            self.record[f'{split}_by_position'] = by_bucket(nats, counts)
        try:
            self.record['probes'] = probe_layers(self.model, self.probe_ids(), self.autocast, self.settings.sparse)
        except Exception as error:  # such as too little memory: the run itself must not be lost
            traceback.print_exc()
            self.record |= {'probes': [], 'probe_error': f'{type(error).__name__}: {error}'}
        self.record |= {'seconds': self.seconds, 'tokens': self.step * self.tokens_per_step}
        self.record['tokens_per_s'] = self.record['tokens'] / self.seconds
        with atomically(self.result) as file:
            file.write(json.dumps(self.record, indent=1).encode())
        self.checkpoint.unlink(missing_ok=True)
        test, rate = self.record['final_test'], self.record['tokens_per_s']
        self.say(f'{self.name}: finished, test {test:.4f} bits per byte, {self.seconds:.0f} s, {rate:,.0f} tokens/s')

    def save(self) -> None:
        self.checkpoint.parent.mkdir(parents=True, exist_ok=True)
        state = {'model': self.model.state_dict(), 'optimizer': self.optimizer.state_dict()['state']}
        with atomically(self.checkpoint) as file:
            torch.save({**state, 'step': self.step, 'seconds': self.seconds, 'record': self.record}, file)

    def restore(self) -> None:
        if not self.checkpoint.exists():
            return
        state = torch.load(self.checkpoint, map_location='cpu', weights_only=True)
        if state['record']['settings'] != self.record['settings']:
            raise ValueError(f'{self.checkpoint} was written under other settings: another --out is needed')
        self.model.load_state_dict(state['model'])
        groups = self.optimizer.param_groups
        rates = [group['lr'] for group in groups]
        self.optimizer.load_state_dict(
            {'state': state['optimizer'], 'param_groups': self.optimizer.state_dict()['param_groups']}
        )
        for group, rate in zip(self.optimizer.param_groups, rates, strict=True):
            group['lr'] = rate
        self.step, self.seconds = state['step'], state['seconds']
        curves = {name: state['record'][name] for name in ('train', 'valid', 'gates')}
        self.record |= curves
        self.say(f'{self.name}: goes on from step {self.step}')


def make_optimizer(model: nn.Module, config: Config, variant: Variant) -> torch.optim.Optimizer:
    """Return the optimizer of the trainer, with groups for parameters that have another learning rate or decay."""
    optimizer = build_optimizer(model, config)
    roles = {p: role(name) for name, p in model.named_parameters()}
    scales = {'gate': variant.gate_lr, 'phi': variant.phi_lr, 'shared': 1.0}
    for group in list(optimizer.param_groups):
        for kind, scale in scales.items():
            decay = 0.0 if kind == 'gate' and not variant.gate_decay else group['weight_decay']
            moved = [p for p in group['params'] if roles[p] == kind]
            if moved and (scale, decay) != (1.0, group['weight_decay']):
                group['params'] = [p for p in group['params'] if roles[p] != kind]
                optimizer.add_param_group({'params': moved, 'weight_decay': decay, 'lr_scale': scale})
    return optimizer


def bits_per_byte(nats: Tensor, counts: Tensor) -> float:
    return (nats.sum() / counts.sum() / math.log(2)).item()


def by_bucket(nats: Tensor, counts: Tensor) -> dict[str, float]:
    """Return bits per byte of the positions between neighbouring BUCKETS."""
    borders = [*(b for b in BUCKETS if b < len(nats)), len(nats)]
    return {f'{a}-{b}': bits_per_byte(nats[a:b], counts[a:b]) for a, b in pairwise(borders)}


def run_job(
    job: Mapping[str, Any], settings: Settings, out: Path, is_over: Callable[[], bool], say: Callable[[str], None]
) -> str:
    """Train one run; returns 'finished' or 'stopped'."""
    training = Training(job['variant'], job['seed'], settings, out, say)
    training.record |= {name: job[name] for name in ('commit', 'command') if name in job}
    try:
        finished = training.train(is_over)
    finally:
        training.graph = None
        del training
        gc.collect()
        if settings.device == 'cuda':
            torch.cuda.empty_cache()
    return 'finished' if finished else 'stopped'
