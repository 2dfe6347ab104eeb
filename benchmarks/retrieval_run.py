"""One run of `benchmarks.retrieval`: train a model on retrieval with a curriculum of lengths, then evaluate it."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Iterator, Mapping
from contextlib import nullcontext
from dataclasses import asdict, dataclass, field
from inspect import signature
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.jobs import StopRequest, say
from benchmarks.learning_variants import SHUT, set_gate_start
from benchmarks.retrieval_tasks import IGNORED, Batch, Task, is_right, make_needle, make_recall, seeded
from native_sparse_attention import SparseAttention
from native_sparse_attention.nn.transformer import Transformer
from train_enwik8 import Graph
from trainer.folder import atomically
from trainer.record import sparse_backend

Row = dict[str, Any]


class Variant(NamedTuple):
    """settings: arguments of SparseAttention. twin: the dense variant that it is compared with, itself if it is dense.
    block_loss: weight of the loss of the block scores. gate_start: gate logits of a head at the start.
    """

    settings: Mapping[str, Any]
    twin: str = 'dense'
    block_loss: float = 0.0
    is_sparse: bool = True
    gate_start: tuple[float, ...] | None = None


LONG = {'merge_window': True, 'select_before_window': True, 'output_gate': True, 'qk_norm': True}
SCORES = {'merge_window': True, 'select_before_window': True, 'compressed_output': False, 'qk_norm': True}
# `long` is the form of the trainer's preset of that name, `long-shut` starts it with its compressed gates at -6, and
# `long-scores` has neither compressed output nor gates.
VARIANTS: Mapping[str, Variant] = {
    'dense': Variant({}, is_sparse=False),
    'dense-qk-norm': Variant({'qk_norm': True}, 'dense-qk-norm', is_sparse=False),
    'separate': Variant({}),
    'merged': Variant({'merge_window': True}),
    'merged-scores': Variant({'merge_window': True, 'compressed_output': False}),
    'long': Variant(LONG, 'dense-qk-norm', block_loss=0.1),
    'long-shut': Variant(LONG, 'dense-qk-norm', block_loss=0.1, gate_start=SHUT),
    'long-scores': Variant(SCORES, 'dense-qk-norm', block_loss=0.1),
}


def option(default: Any, text: str) -> Any:
    return field(default=default, metadata={'help': text})


@dataclass(frozen=True)
class Config:
    """Settings of a run, saved with it. Every field but `variant` and `seed` is a flag."""

    variant: str
    seed: int
    lengths: tuple[int, ...] = option((512, 1024, 2048, 4096, 8192), 'stages of the curriculum, in tokens')
    first_lengths: tuple[int, ...] = option(
        (32, 64, 128, 256), 'stages before, of which those below --lengths are taken'
    )
    dim: int = option(256, 'width of the model')
    depth: int = option(4, 'layers')
    heads: int = option(4, 'query heads')
    kv_heads: int = option(2, 'key/value heads')
    dim_head: int = option(64, 'size of a head')
    window: int = option(128, 'tokens that the window reads')
    compress_block: int = option(32, 'length of a compressed block')
    compress_stride: int = option(16, 'distance between starts of compressed blocks')
    selection_block: int = option(32, 'length of a selection block')
    num_selected: int = option(16, 'blocks that a query reads, forced ones included')
    num_init: int = option(1, 'forced blocks at the start')
    num_local: int = option(2, "forced blocks up to the query's own")
    diff_topk: bool = option(True, 'gradients reach the block scores')
    compress_mlp_expand: float = option(1.0, 'hidden size of the compression networks over a block')
    num_tokens: int = option(256, 'vocabulary')
    key_tokens: int = option(1, 'tokens of a key')
    value_tokens: int = option(1, 'tokens of a value')
    pairs: int = option(64, 'key-value pairs in a sequence of associative recall, at most')
    pair_spacing: int = option(8, 'tokens per pair in short sequences: with few pairs the mechanism is soon found')
    queries: int = option(32, 'questions at its end, at most one per pair')
    repeats: float = option(0.0, 'share of the pairs of a training sequence that repeat another one, with a loss')
    needle_share: float = option(
        0.25, 'share of sequences with one pair and one question, from the first of --lengths on'
    )
    tokens_per_step: int = option(65_536, 'batch size times length')
    steps: int = option(3000, 'optimizer steps of all stages; the last stage lasts until then')
    stage_steps: int = option(1500, 'a stage before the last ends after so many steps at the latest')
    threshold: float = option(0.99, 'a stage ends at this accuracy of recall and of needles')
    check_every: int = option(20, 'steps over which that accuracy is taken; every step has fresh data')
    lr: float = option(1e-3, 'learning rate after the warm-up')
    warmup: int = option(100, 'steps of linear warm-up')
    decay: float = option(0.2, 'share of the steps in which the learning rate falls linearly, to a tenth')
    weight_decay: float = option(0.1, 'on weight matrices')
    clip: float = option(1.0, 'largest norm of the gradient')
    factors: tuple[int, ...] = option((1, 2, 4), 'evaluated lengths over the trained length')
    depths: int = option(11, 'needle depths of the evaluation, from the start to the end of the body')
    eval_samples: int = option(64, 'sequences of an evaluated length and depth')
    amp: bool = option(True, 'bfloat16 autocast on GPUs')
    backend: str = option('auto', 'of sparse attention: auto, triton, flex or eager')

    def __post_init__(self) -> None:
        if self.variant not in VARIANTS:
            raise ValueError(f'variant is {self.variant!r}, but must be one of {", ".join(VARIANTS)}')
        missing = VARIANTS[self.variant].settings.keys() - signature(SparseAttention).parameters.keys()
        if missing:
            raise ValueError(f'variant is {self.variant!r}, but SparseAttention has no {", ".join(sorted(missing))}')
        for name in ('lengths', 'first_lengths'):
            if list(getattr(self, name)) != sorted(set(getattr(self, name))) or not self.lengths:
                raise ValueError(f'{name} is {getattr(self, name)}, but must be ascending')
        positive = ('steps', 'stage_steps', 'check_every', 'depths', 'eval_samples', 'pair_spacing')
        for name in positive:
            if getattr(self, name) < 1:
                raise ValueError(f'{name} is {getattr(self, name)}, but must be at least 1')
        for name in ('needle_share', 'repeats'):
            if not 0 <= getattr(self, name) < 1:
                raise ValueError(f'{name} is {getattr(self, name)}, but must lie in [0, 1)')
        least = 2 if self.needle_share else 1
        if self.batch(self.trained) < least:
            raise ValueError(
                f'tokens_per_step is {self.tokens_per_step}, but must be at least {least * self.trained}, '
                f'{least} sequences of the last length'
            )
        for length in self.stages:
            self.task(length).check(length)

    @property
    def name(self) -> str:
        return f'{self.variant}-seed{self.seed}'

    @property
    def stages(self) -> list[int]:
        """Lengths of the curriculum."""
        return [*(length for length in self.first_lengths if length < self.lengths[0]), *self.lengths]

    @property
    def trained(self) -> int:
        return self.lengths[-1]

    def task(self, length: int) -> Task:
        pairs = max(1, min(self.pairs, length // self.pair_spacing))
        return Task(self.num_tokens, self.key_tokens, self.value_tokens, pairs, min(pairs, self.queries))

    def num_repeats(self, length: int) -> int:
        task = self.task(length)
        return min(int(self.repeats * task.pairs), task.pairs - task.queries)

    def batch(self, length: int) -> int:
        return self.tokens_per_step // length

    def num_needles(self, length: int) -> int:
        """Sequences of a training batch that hold a needle.

        None in the first lengths: in a text with one value no key has to be compared.
        """
        return math.ceil(self.needle_share * self.batch(length)) if length >= self.lengths[0] else 0

    def eval_lengths(self) -> list[int]:
        return sorted({*self.stages, *(factor * self.trained for factor in self.factors)})

    def learning_rate(self, step: int) -> float:
        """Return the learning rate after `step` steps: linear warm-up, constant, linear decay to a tenth."""
        left = (self.steps - step) / max(1.0, self.decay * self.steps)
        return self.lr * min((step + 1) / max(1, self.warmup), 1.0, 0.1 + 0.9 * min(1.0, left))


def build_model(config: Config, device: torch.device) -> Transformer:
    torch.manual_seed(config.seed)
    variant = VARIANTS[config.variant]
    sparse = {
        'sliding_window_size': config.window,
        'compress_block_size': config.compress_block,
        'compress_block_sliding_stride': config.compress_stride,
        'selection_block_size': config.selection_block,
        'num_selected_blocks': config.num_selected,
        'num_init_blocks': config.num_init,
        'num_local_blocks': config.num_local,
        'use_diff_topk': config.diff_topk,
        'compress_mlp_expand_factor': config.compress_mlp_expand,
    }
    shape = {name: getattr(config, name) for name in ('dim', 'depth', 'heads', 'kv_heads', 'dim_head')}
    model = Transformer(
        config.num_tokens,
        **shape,
        use_sparse_attn=variant.is_sparse,
        sparse_attn_kwargs={**sparse, **variant.settings} if variant.is_sparse else variant.settings,
        backend=config.backend,
    ).to(device)
    if variant.gate_start is not None:
        set_gate_start(model, variant.gate_start)
    return model


def build_optimizer(model: nn.Module, config: Config) -> torch.optim.Optimizer:
    matrices = [p for name, p in model.named_parameters() if p.ndim >= 2 and name.endswith('weight')]
    held = {id(p) for p in matrices}
    others = [p for p in model.parameters() if id(p) not in held]
    groups = [{'params': matrices}, {'params': others, 'weight_decay': 0.0}]
    fused = matrices[0].is_cuda
    return torch.optim.AdamW(groups, config.lr, (0.9, 0.95), weight_decay=config.weight_decay, fused=fused)


class Stopped(Exception):
    """A signal was received; the run is between two steps."""


@dataclass
class Run:
    """A model in training. `<name>.json` and `<name>.pt` in `folder` hold its results and its checkpoint."""

    config: Config
    folder: Path
    device: torch.device
    where: dict[str, Any]  # of `report.machine`
    stop: StopRequest
    save_seconds: float = 60.0
    step: int = 0  # steps done
    stage: int = 0
    seconds: float = 0.0  # of training
    stages: list[Row] = field(default_factory=list)
    rows: list[Row] = field(default_factory=list)  # a row per check
    evaluations: list[Row] = field(default_factory=list)
    recent: list[Tensor] = field(default_factory=list)  # results of the steps since the last check
    graph: Graph | None = None

    def __post_init__(self) -> None:
        self.model = build_model(self.config, self.device)
        self.optimizer = build_optimizer(self.model, self.config)
        self.saved_at = time.monotonic()

    @property
    def length(self) -> int:
        return self.config.stages[self.stage]

    def carry_out(self) -> bool:
        """Train and evaluate from the current step. Returns False if a signal stopped the run."""
        try:
            self.train()
            self.evaluate()
        except Stopped:
            say(f'{self.config.name}: stopped and saved at step {self.step}')
            self.save(finished=False)
            return False
        self.save(finished=True)
        return True

    def save_if_due(self) -> None:
        if self.stop:
            raise Stopped
        if time.monotonic() - self.saved_at >= self.save_seconds:
            self.save(finished=False)

    def train(self) -> None:
        config, backend = self.config, self.backend()
        replays = self.device.type == 'cuda' and backend in (None, 'triton')
        self.model.train()
        while self.step < config.steps:
            if len(self.stages) <= self.stage:
                self.stages.append({'length': self.length, 'start': self.step, 'steps': 0, 'passed_after': None})
            started = time.perf_counter()
            self.train_step(replays)
            is_check = self.step % config.check_every == 0 or self.step == config.steps
            figures = torch.stack(self.recent).mean(0).tolist() if is_check else None
            self.seconds += time.perf_counter() - started
            if figures is not None:
                self.check(*figures)
            self.save_if_due()

    def train_step(self, replays: bool) -> None:
        config = self.config
        for group in self.optimizer.param_groups:
            group['lr'] = config.learning_rate(self.step)
        batch = self.draw()
        both = torch.stack((batch.ids, batch.labels))
        self.recent.append(self.differentiate(both) if self.graph is None else self.graph(both))
        nn.utils.clip_grad_norm_(self.model.parameters(), config.clip)
        self.optimizer.step()
        self.step += 1
        if self.graph is None:
            self.optimizer.zero_grad()
            if replays:
                self.graph = Graph(self.differentiate, both)

    def draw(self) -> Batch:
        """The training data of this step: recall, then needles at random depths. Depends on seed and step alone."""
        config, length = self.config, self.length
        generator = seeded(self.device, 'train', config.seed, self.step)
        count = config.num_needles(length)
        task, recalls = config.task(length), config.batch(length) - count
        parts = [make_recall(task, recalls, length, generator, config.num_repeats(length))]
        if count:
            depth = torch.rand(count, generator=generator, device=self.device)
            parts.append(make_needle(task, depth, length, generator))
        return Batch(*map(torch.cat, zip(*parts, strict=True)))

    def differentiate(self, both: Tensor) -> Tensor:
        """Return loss, accuracy of recall and of needles, float32 [3], of ids and labels [2, B, L]; keep gradients.

        The loss is the mean over sequences of the mean over answers, so that a needle counts as a whole sequence. The
        loss of the block scores is trained beside it, and not returned.
        """
        (ids, labels), weight = both, VARIANTS[self.config.variant].block_loss
        logits, block_loss = self.logits(ids, weight > 0)
        answers = labels != IGNORED
        count = answers.sum(1)
        nats = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=IGNORED, reduction='none')
        loss = (nats.view_as(labels).sum(1) / count).mean()
        (loss + weight * block_loss).backward()
        right = ((logits.argmax(-1) == labels) & answers).sum(1) / count
        needles = self.config.num_needles(ids.shape[1])
        recall = right[: len(right) - needles].mean()
        needle = right[len(right) - needles :].mean()  # NaN without needles
        return torch.stack((loss.detach(), recall, needle))

    def logits(self, ids: Tensor, needs_block_loss: bool = False) -> tuple[Tensor, Tensor | float]:
        """Return the logits, float32, and the loss of the block scores or 0."""
        with self.autocast():
            if needs_block_loss:
                logits, block_loss = self.model(ids, return_block_loss=True)
                return logits.float(), block_loss
            return self.model(ids).float(), 0.0

    def autocast(self) -> Any:
        enabled = self.config.amp and self.device.type == 'cuda'
        return torch.autocast('cuda', torch.bfloat16) if enabled else nullcontext()

    def backend(self) -> str | None:
        """Backend of sparse attention in a training step; None for dense attention."""
        x = torch.empty(self.config.batch(self.length), self.length, self.config.dim, device=self.device)
        with self.autocast():
            found = sparse_backend(self.model, x)
        return found and found.split()[0]

    def check(self, loss: float, recall: float, needle: float) -> None:
        """Record the steps since the last check, and start the next stage if they pass the threshold."""
        config, stage = self.config, self.stages[self.stage]
        if not math.isfinite(loss):
            raise FloatingPointError(f'step {self.step}: the loss is {loss}')
        self.recent = []
        has_needles = not math.isnan(needle)
        row = {'step': self.step, 'length': self.length, 'loss': loss, 'recall': recall, 'seconds': self.seconds}
        self.rows.append({**row, 'needle': needle if has_needles else None})
        stage['steps'] = self.step - stage['start']
        passed = min(recall, needle if has_needles else 1.0) >= config.threshold
        if passed and stage['passed_after'] is None:
            stage['passed_after'] = stage['steps']
        shown = f'needle {needle:.1%}, ' * has_needles
        figures = f'loss {loss:.3f}, recall {recall:.1%}, {shown}{self.seconds:.0f} s'
        say(f'{config.name}: step {self.step} of {config.steps}, length {self.length:,}: {figures}')
        is_last = self.stage == len(config.stages) - 1
        if not is_last and (passed or stage['steps'] >= config.stage_steps):
            self.stage += 1
            self.graph = None
            self.optimizer.zero_grad()  # gradients live in the memory of the graph

    @torch.no_grad()
    def evaluate(self) -> None:
        """Accuracy of recall by length, and of needles by length and depth. Data are the same for every variant."""
        config = self.config
        self.graph = None
        self.optimizer.zero_grad()
        self.model.eval()
        done = {(row['task'], row['length'], row['depth']) for row in self.evaluations}
        depths = [index / max(1, config.depths - 1) for index in range(config.depths)]
        for length in config.eval_lengths():
            for task, depth in [('recall', None), *(('needle', depth) for depth in depths)]:
                if (task, length, depth) in done:
                    continue
                self.save_if_due()
                right = [
                    is_right(self.logits(b.ids)[0], b.labels, config.value_tokens) for b in self.problems(length, depth)
                ]
                answers = torch.cat(right)
                row = {'task': task, 'length': length, 'depth': depth, 'answers': len(answers)}
                self.evaluations.append({**row, 'accuracy': answers.double().mean().item()})
            found = {row['task']: row['accuracy'] for row in self.worst_first(length)}
            say(f'{config.name}: length {length:,}: ' + ', '.join(f'{k} {v:.1%}' for k, v in found.items()))

    def worst_first(self, length: int) -> list[Row]:
        """Evaluations of a length, the lowest accuracy of each task last."""
        return sorted((row for row in self.evaluations if row['length'] == length), key=lambda row: -row['accuracy'])

    def problems(self, length: int, depth: float | None) -> Iterator[Batch]:
        """Make sequences of an evaluation: recall if depth is None, else needles at that depth."""
        config = self.config
        left, rows = config.eval_samples, max(1, config.tokens_per_step // length)
        while left:
            batch = min(left, rows)
            left -= batch
            generator = seeded(self.device, 'evaluation', config.seed, length, depth, left)
            if depth is None:
                yield make_recall(config.task(length), batch, length, generator)
            else:
                yield make_needle(config.task(length), torch.full((batch,), depth), length, generator)

    def result(self, finished: bool) -> Row:
        return {
            'machine': self.where,
            'config': asdict(self.config),
            'parameters': sum(p.numel() for p in self.model.parameters()),
            'backend': self.backend(),
            'finished': finished,
            **self.progress(),
        }

    def progress(self) -> Row:
        return {name: getattr(self, name) for name in ('step', 'stage', 'seconds', 'stages', 'rows', 'evaluations')}

    def save(self, finished: bool) -> None:
        state = {
            'config': asdict(self.config),
            'model': self.model.state_dict(),
            'optimizer': self.optimizer.state_dict(),
            'recent': self.recent,
            # The loss of the block scores draws queries.
            'random': torch.get_rng_state(),
            'random_cuda': torch.cuda.get_rng_state(self.device) if self.device.type == 'cuda' else None,
            **self.progress(),
        }
        with atomically(self.folder / f'{self.config.name}.pt') as file:
            torch.save(state, file)
        with atomically(self.folder / f'{self.config.name}.json') as file:
            file.write(json.dumps(self.result(finished), indent=1).encode() + b'\n')
        self.saved_at = time.monotonic()

    def restore(self) -> None:
        """Continue from the checkpoint in the folder, if there is one."""
        path = self.folder / f'{self.config.name}.pt'
        if not path.exists():
            return
        state = torch.load(path, map_location='cpu', weights_only=True)
        refuse_changes(path, state.pop('config'), self.config)
        self.model.load_state_dict(state.pop('model'))
        self.optimizer.load_state_dict(state.pop('optimizer'))
        self.recent = [figures.to(self.device) for figures in state.pop('recent')]
        torch.set_rng_state(state.pop('random'))
        random_cuda = state.pop('random_cuda')
        if self.device.type == 'cuda':
            torch.cuda.set_rng_state(random_cuda, self.device)
        for name, value in state.items():
            setattr(self, name, value)
        say(f'{self.config.name}: resumed at step {self.step}')


def refuse_changes(path: Path, held: Mapping[str, Any], config: Config) -> None:
    """Raise ValueError if the run in `path` has other settings than `config`."""
    for name, value in asdict(config).items():
        if json.dumps(held.get(name)) != json.dumps(value):
            raise ValueError(f'{name} is {value}, but {path} has {held.get(name)}: use another folder for --out')
