"""Train a byte-level language model with Native Sparse Attention on enwik8 and watch it learn to write.

    python train_enwik8.py                      minutes on a CPU (preset cpu), longer on a GPU (preset base)
    python train_enwik8.py --attention dense    the same model with full attention
    python train_enwik8.py --compare RUN RUN    curves of runs over each other, over steps and over seconds, and a table
    python train_enwik8.py --resume             the same command again: the run goes on where it stopped
    python train_enwik8.py --check-decode       decoding through the cache against the full forward, on the checkpoint
    python train_enwik8.py --sample runs/<name> --prompt 'The ' --tokens 2000    text by the checkpoint, as it comes
    torchrun --nproc-per-node 8 train_enwik8.py --dp 4 --tp 2    the same run on 8 GPUs: batches in 4 parts, layers in 2
    torchrun --nproc-per-node 8 train_enwik8.py --dp 4 --cp 2    batches in 4 parts, sequences in 2

A run writes log.jsonl, loss.png, samples and checkpoints to runs/<name>/. Losses are bits per byte. Validation and test
predict each byte but the first exactly once, in windows of --seq-len bytes. trainer/config.py holds the settings.
"""

from __future__ import annotations

import argparse
import contextlib
import math
import signal
import sys
import time
import traceback
from dataclasses import dataclass, fields, replace
from typing import Any

import torch
from torch import Tensor, nn

from native_sparse_attention.nn.transformer import Transformer
from trainer import plots
from trainer.batches import draw, seeded, windows
from trainer.config import PRESETS, Config, parse, spelled
from trainer.console import Interrupted, UserError, as_user_error, note_signals, progress, say
from trainer.corpus import Corpus, load_corpus
from trainer.decode_check import check_decode
from trainer.folder import claim_run, load_checkpoint, write_atomically
from trainer.graph import Graph, build_ahead
from trainer.ranks import ONE_PROCESS, Ranks, joined
from trainer.record import Record, parameter_counts
from trainer.sampling import sample
from trainer.start import find_start
from trainer.tensors import read_newest

__all__ = [
    'PRESETS', 'Config', 'Corpus', 'Graph', 'Run', 'Transformer', 'UserError', 'build_model', 'build_optimizer', 'draw',
    'learning_rate', 'load_checkpoint', 'load_corpus', 'main', 'open_run', 'parse', 'spelled', 'windows',
]  # fmt: skip


def build_model(config: Config, backend: str, device: torch.device) -> Transformer:
    torch.manual_seed(config.seed)
    shape = {f.name: getattr(config, f.name) for f in fields(Config) if 'model' in f.metadata}
    sparse = {f.name: getattr(config, f.name) for f in fields(Config) if 'sparse' in f.metadata}
    use_sparse = config.attention == 'sparse'
    return Transformer(256, use_sparse_attn=use_sparse, sparse_attn_kwargs=sparse, backend=backend, **shape).to(device)


def build_optimizer(model: nn.Module, config: Config) -> torch.optim.Optimizer:
    """AdamW that decays weight matrices, and leaves norms, biases, memories and learned positions alone."""
    matrices = {name: p for name, p in model.named_parameters() if p.ndim >= 2 and _is_weight(name)}
    others = [p for name, p in model.named_parameters() if name not in matrices]
    groups = [{'params': list(matrices.values())}, {'params': others, 'weight_decay': 0.0}]
    betas, decay, fused = (config.beta1, config.beta2), config.weight_decay, groups[0]['params'][0].is_cuda
    return torch.optim.AdamW(groups, config.lr, betas, weight_decay=decay, fused=fused)


def _is_weight(name: str) -> bool:
    return name.endswith('weight') or 'to_qkv.' in name  # divided layers have several of these


def build(config: Config, options: argparse.Namespace, ranks: Ranks) -> tuple[torch.device, Transformer]:
    if config.batch % ranks.dp:
        raise UserError(f'--dp {ranks.dp}: must divide --batch {config.batch}')
    if ranks.cp > 1 and config.block_loss and config.attention == 'sparse':
        raise UserError(f'--cp {ranks.cp}: needs whole sequences for --block-loss {config.block_loss}, which must be 0')
    if options.backend != 'auto' and config.attention == 'dense' and not (options.resume or options.check_decode):
        raise UserError(f'--backend {options.backend}: must be auto, since the model has dense attention')
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


@dataclass
class Run(Record):
    """A model in training, and the folder that it writes to."""

    replays: bool = False  # all steps but the first, as a CUDA graph
    graph: Graph | None = None

    def train(self) -> None:
        """Train from the current step to the last validation and sample."""
        config, done, spent = self.config, 0, 0.0
        with progress(self.folder.name, config.steps, self.step, 'step', shows=self.ranks.is_first) as bar:
            while True:
                if self.evaluation_is_due():
                    self.evaluate('valid')
                    self.plot()
                if self.due(config.sample_every):
                    self.write_sample()
                if self.step == config.steps:
                    return
                started = time.perf_counter()
                self.train_step()
                bpb = torch.stack(self.recent).mean().item() / math.log(2) if self.due(config.log_every) else None
                elapsed = time.perf_counter() - started
                done, spent, self.seconds = done + 1, spent + elapsed, self.seconds + elapsed
                bar.update()
                if bpb is not None:
                    self.report(bpb, done / spent, bar)
                    done, spent = 0, 0.0
                if self.due(config.save_every):
                    self.save()
                self.stop_at_signal()

    def due(self, every: int) -> bool:
        return self.step == self.config.steps or (self.step > 0 and self.step % every == 0)

    def evaluation_is_due(self) -> bool:
        """At every --eval-every, and before it at step 0 and at 1/16, 1/8, 1/4 and 1/2 of it: a curve falls early."""
        every = self.config.eval_every
        return self.step in {0, *(every >> power for power in range(1, 5))} or self.due(every)

    def train_step(self) -> None:
        config = self.config
        self.model.train()
        for group in self.optimizer.param_groups:
            group['lr'] = learning_rate(self.step, config)
        ids = self.ranks.rows(draw(self.corpus.splits['train'], config, self.step), dim=1)
        if self.device.type == 'cuda':  # from pageable memory the copy would wait for the step before
            ids = ids.pin_memory().to(self.device, non_blocking=True)
        loss = self.differentiate(ids) if self.graph is None else self.graph(ids)
        self.recent.append(self.ranks.sum(loss) / self.ranks.dp)
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
            loss, total = self.losses(part)
            (total / len(ids)).backward()
            losses.append(loss.detach() / len(ids))
        return torch.stack(losses).sum()

    def losses(self, ids: Tensor) -> tuple[Tensor, Tensor]:
        """The loss of ids, and the sum that is trained: with --block-loss times the loss of the block scores."""
        weight = self.config.block_loss if self.config.attention == 'sparse' else 0.0
        if not weight:
            loss = self.loss(ids)
            return loss, loss
        with self.autocast():
            tokens = self.ranks.tokens(ids).to(self.device)
            loss, block_loss = self.forward(tokens, return_loss=True, return_block_loss=True)
        return loss, loss + weight * block_loss

    def loss(self, ids: Tensor) -> Tensor:
        """Mean nats per predicted byte of ids [B, T + 1]."""
        with self.autocast():
            return self.forward(self.ranks.tokens(ids).to(self.device), return_loss=True)

    @torch.no_grad()
    def evaluate(self, split: str) -> None:
        """Log and print the bits per byte of a split, or of its first --eval-bytes."""
        whole, nats = self.corpus.splits[split], 0.0
        text = whole[: self.config.eval_bytes or None]
        self.model.eval()
        with progress(split, len(text) - 1, 0, 'B', leave=False, shows=self.ranks.is_first) as bar:
            for ids in windows(text, self.config.seq_len, self.config.batch):
                self.stop_at_signal()
                # All processes make the same calls: one without rows reads the first, which does not count.
                mine = self.ranks.rows(ids)
                nats += self.loss(mine if len(mine) else ids[:1]).item() * mine[:, 1:].numel()
                bar.update(ids[:, 1:].numel())
        nats = self.ranks.sum(torch.tensor(nats, dtype=torch.float64)).item()
        bpb = nats / math.log(2) / (len(text) - 1)
        self.log(split=split, bpb=bpb, bytes=len(text), bytes_of_split=len(whole))
        say(f'step {self.step}: {split} {bpb:.4f} bits per byte ({self.corpus.name}, {plots.coverage(self.rows[-1])})')

    def generate(self, count: int) -> Tensor:
        generator = seeded(self.config, 'sample', self.step, self.device)
        settings = {'temperature': self.config.temperature, 'top_p': self.config.top_p, 'generator': generator}
        with self.ranks.holding(self.model):
            return self.model.generate(self.prompt(), count, **settings)

    def write_sample(self) -> None:
        ids = self.prompt(), self.generate(self.config.sample_bytes)
        if not self.ranks.is_first:
            return
        given, new = (bytes(row[0].tolist()).decode(errors='replace') for row in ids)
        head = f'{self.folder.name}, step {self.step}: the validation text of {self.corpus.name} continued'
        text = f'{head}\n\n{given}\n--- continued ---\n{new}\n'
        write_atomically(self.folder / f'sample-{self.step:06d}.txt', text.encode())
        say(f'\n{text}')

    def rehearse(self) -> None:
        """A forward, a backward and a generated byte: what this model cannot do is said before anything is written."""
        with as_user_error(ValueError, NotImplementedError), torch.random.fork_rng():
            ids = self.ranks.rows(draw(self.corpus.splits['train'], self.config, self.step)[0])
            if self.ranks.mesh is None and self.forward is self.model:
                build_ahead(self.losses, self.loss, ids)
            self.losses(ids)[1].backward()
            self.generate(1)
        self.optimizer.zero_grad()


def open_run(
    options: argparse.Namespace, given: dict[str, Any], locks: contextlib.ExitStack, ranks: Ranks = ONE_PROCESS
) -> Run:
    """Return a new run that has written nothing yet, or with --resume or --check-decode the one of a checkpoint.

    The text is loaded last, so that a refusal asks no network. `locks` holds the lock of a resumed run.
    """
    start = ranks.from_first(lambda: find_start(options, given, locks))
    device, model = ranks.together(lambda: build(start.config, options, ranks))
    ranks.divide(model, options.compile)
    with as_user_error(ValueError):
        optimizer = build_optimizer(model, start.config)
    corpus = ranks.from_first(lambda: start.corpus(only_prompt=options.check_decode))
    forward = torch.compile(model) if options.compile and ranks.mesh is None else model
    run = Run(start.config, start.preset, start.folder, corpus, device, model, forward, optimizer, ranks)
    run.replays = options.graph and not options.compile and run.can_replay()
    locks.callback(setattr, run, 'graph', None)  # before the processes leave their group
    if start.state:
        read_newest(run.folder, start.state, run.restore)
    return run


def carry_out(run: Run, options: argparse.Namespace, locks: contextlib.ExitStack) -> int:
    """Train from the current step to the end, test, and return the exit code."""
    if run.finished:
        raise UserError(f'{run.folder}: finished after {run.step} steps (--name starts another run)')
    run.rehearse()
    if options.wandb:
        run.ranks.from_first(run.start_wandb)
    with torch.random.fork_rng():
        twin = build_model(replace(run.config, attention='dense'), 'auto', torch.device('cpu'))
    if not options.resume:
        run.ranks.from_first(lambda: claim_run(run.folder, locks))
    run.begin(options.resume, parameter_counts(run.model, twin), run.backend())
    note_signals(run.signals)
    code = 0
    try:
        run.train()
        run.evaluate('test')
        run.finished = True
    except Interrupted as interrupted:
        code = 128 + interrupted.args[0]
        say(f'{run.folder}: interrupted and saved at step {run.step} (the same command with --resume goes on)')
    run.save()
    if run.finished:
        run.end()
    return code


def main(argv: list[str] | None = None) -> int:
    """Exit code 0; 1 if --check-decode finds a difference; 2 for what the user can put right; 128 + n on signal n."""
    try:
        with joined() as join, contextlib.ExitStack() as locks:
            options, given = parse(argv, __doc__ or '')
            ranks = join(options)
            if options.sample:
                return sample(options, given, build)
            if options.compare:
                return plots.compare(options.compare, options.runs_dir / 'compare.png')
            run = open_run(options, given, locks, ranks)
            if options.check_decode:
                return check_decode(run, options.backend in ('auto', 'eager'), seeded(run.config, 'check', 0))
            return carry_out(run, options, locks)
    except (UserError, OSError) as error:
        if '--traceback' in (sys.argv if argv is None else argv):
            traceback.print_exc()
        message = f'{error.filename}: {error.strerror}' if isinstance(error, OSError) and error.filename else str(error)
        if message:  # another process has one otherwise
            print(f'train_enwik8.py: {message}', file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 128 + signal.SIGINT


if __name__ == '__main__':
    sys.exit(main())
