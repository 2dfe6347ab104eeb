"""The state of a run: its log, picture and checkpoint, and the lines that open and close it."""

from __future__ import annotations

import io
import math
import shutil
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from tqdm import tqdm

from native_sparse_attention import SparseAttention
from native_sparse_attention.nn.dense import DenseAttention
from native_sparse_attention.nn.transformer import Transformer
from trainer import plots
from trainer.config import Config
from trainer.console import Interrupted, UserError, say
from trainer.corpus import Corpus
from trainer.folder import CHECKPOINT, LOG, TENSORS, append_row, encode_rows, write_atomically
from trainer.ranks import Ranks
from trainer.tensors import load_tensors, save_tensors

LINE_SECONDS = 10  # at least, between two lines of progress where there is no bar


@dataclass
class Record:
    """A model in training, and the folder that it writes to."""

    config: Config
    preset: str
    folder: Path
    corpus: Corpus
    device: torch.device
    model: Transformer
    forward: Callable[..., Tensor]  # the model, or its compiled form
    optimizer: torch.optim.Optimizer
    ranks: Ranks = field(default_factory=Ranks)
    step: int = 0  # steps done
    seconds: float = 0.0  # in training steps, without evaluations and samples
    recent: list[Tensor] = field(default_factory=list)  # losses since the last training line of the log
    rows: list[dict[str, Any]] = field(default_factory=list)  # of the log
    finished: bool = False
    tensors: str = ''  # folder that the checkpoint names
    signals: list[int] = field(default_factory=list)  # received by this process
    printed: float = -math.inf  # time of the last line of progress
    wandb: Any = None

    def prompt(self) -> Tensor:
        return self.corpus.splits['valid'][: self.config.prompt_bytes].long()[None].to(self.device)

    def stop_at_signal(self) -> None:
        """Raise `Interrupted` if a signal arrived in any process."""
        if number := self.ranks.agree(self.signals[0] if self.signals else 0):
            raise Interrupted(number)

    def autocast(self) -> torch.autocast:
        enabled = self.config.amp and self.device.type == 'cuda'
        return torch.autocast(self.device.type, torch.bfloat16, enabled=enabled)

    def backend(self) -> str | None:
        """Return the backend of sparse attention in a training step, and why not a faster one; None for dense."""
        x = torch.empty(self.config.batch // self.ranks.dp, self.config.seq_len, self.config.dim, device=self.device)
        with self.autocast():
            return sparse_backend(self.model, x)

    def can_replay(self) -> bool:
        """Return whether every step has the same launches and reads nothing back."""
        is_eager = self.forward is self.model and self.ranks.can_capture
        return self.device.type == 'cuda' and is_eager and self.backend() in (None, 'triton')

    def log(self, **row: Any) -> None:
        """Add a line to log.jsonl. A figure stands beside the text, the split and the number of bytes it covers."""
        row = {'step': self.step, 'seconds': round(self.seconds, 3), 'corpus': self.corpus.name, **row}
        self.rows.append(row)
        if self.ranks.is_first:
            append_row(self.folder, row)
        if self.wandb and 'split' in row:
            self.wandb.log({f'{row["split"]} bits per byte, {self.corpus.name}': row['bpb']}, step=self.step)

    def report(self, bpb: float, steps_per_second: float, bar: tqdm) -> None:
        """Log and show the mean of the recent training losses, and forget these losses.

        Raises:
            UserError: the loss is not finite.
        """
        if not math.isfinite(bpb):
            raise UserError(f'step {self.step}: the loss is {bpb} (a smaller --lr or --clip may help)')
        config = self.config
        bytes_per_step = config.grad_accum * config.batch * config.seq_len
        rate, lr = steps_per_second * bytes_per_step, self.optimizer.param_groups[0]['lr']
        covered = len(self.recent) * bytes_per_step
        self.log(split='train', bpb=bpb, bytes=covered, lr=lr, tokens_per_s=round(rate))
        self.recent = []
        figures = f'{bpb:.3f} bits per byte, {rate:,.0f} tokens/s'
        bar.set_postfix_str(figures)
        if bar.disable and time.perf_counter() - self.printed >= LINE_SECONDS:
            say(f'step {self.step} of {config.steps}: train {figures}')
            self.printed = time.perf_counter()

    def log_yardsticks(self) -> None:
        """Log the bits per byte of the evaluated texts by gzip -9, and by the byte frequencies of the training text."""
        for of, name in (('valid', 'validation'), ('test', 'test')):
            whole = self.corpus.splits[of]
            text = whole[: self.config.eval_bytes or None]
            covers = {'of': of, 'bytes': len(text), 'bytes_of_split': len(whole)}
            self.log(yardstick=f'gzip -9 of the {name} text', bpb=plots.gzip_bits(text), **covers)
            bits = plots.unigram_bits(self.corpus.splits['train'], text)
            self.log(yardstick=f'unigram model of the {name} text', bpb=bits, **covers)

    def plot(self) -> None:
        if not self.ranks.is_first:
            return
        title = f'{self.folder.name}: {self.config.attention} attention on {self.corpus.name}'
        plots.plot_run(self.folder / 'loss.png', self.rows, title)

    def save(self) -> None:
        """Write the tensors of this step to a folder, and then the checkpoint that names it.

        Raises:
            OSError: of a full disk, say. The new folder is removed, and the last checkpoint is as it was.
        """
        tensors = f'{TENSORS}{self.step:06d}'
        path, is_new = self.folder / tensors, tensors != self.tensors
        try:
            if is_new:
                self.ranks.from_first(lambda: shutil.rmtree(path, ignore_errors=True))  # left by a killed process
                save_tensors(path, self.model, self.optimizer if self.step else None)
            if self.ranks.is_first:
                self._write_checkpoint(tensors)
        except OSError:
            if is_new and self.ranks.is_first:
                shutil.rmtree(path, ignore_errors=True)
            raise
        self.tensors = tensors
        if self.ranks.is_first:
            for other in self.folder.glob(f'{TENSORS}*'):
                if other.name != tensors:
                    shutil.rmtree(other)

    def _write_checkpoint(self, tensors: str) -> None:
        state = {
            'config': asdict(self.config),
            'preset': self.preset,
            'corpus': {'name': self.corpus.name, 'data': self.corpus.data, 'sha256': self.corpus.sha256},
            'prompt': self.prompt()[0].byte().cpu(),
            'tensors': tensors,
            'random': torch.get_rng_state(),
            'random_cuda': torch.cuda.get_rng_state(self.device) if self.device.type == 'cuda' else None,
            **{name: getattr(self, name) for name in ('step', 'seconds', 'recent', 'rows', 'finished')},
        }
        content = io.BytesIO()  # torch.save hides the OSError of a file that it writes to
        torch.save(state, content)
        write_atomically(self.folder / CHECKPOINT, content.getvalue())

    def restore(self, state: dict[str, Any]) -> None:
        """Stand where the checkpoint was written. Evaluations at that very step are repeated, so their lines go."""
        self.step, self.seconds, self.finished = state['step'], state['seconds'], state['finished']
        self.tensors = state['tensors']
        load_tensors(self.folder / self.tensors, self.model, self.optimizer if self.step else None)
        self.recent = [loss.to(self.device) for loss in state['recent']]
        self.rows = [r for r in state['rows'] if r['step'] < self.step or r.get('split') in (None, 'train')]
        torch.set_rng_state(state['random'])
        if self.device.type == 'cuda' and state['random_cuda'] is not None:
            torch.cuda.set_rng_state(state['random_cuda'], self.device)

    def begin(self, resumed: bool, sizes: dict[str, int], backend: str | None) -> None:
        """Start the log, or cut it back to the checkpoint, and print what is trained."""
        if self.ranks.is_first:
            write_atomically(self.folder / LOG, encode_rows(self.rows))
        if not resumed:
            about = {'preset': self.preset, 'config': asdict(self.config), 'parameters': sizes}
            self.log(**about, torch=str(torch.__version__), backend=backend)
            if self.ranks.is_first:
                self.log_yardsticks()
            self.save()
        counts = f'{sizes["total"]:,} parameters ({sizes["attention"]:,} in attention'
        counts += f', {sizes["sparse only"]:,} of them only in sparse attention)' if sizes['sparse only'] else ')'
        length = len(self.corpus.splits['train'])
        what = f'{self.config.attention} attention, {counts}, {length:,} bytes of {self.corpus.name} to train on'
        say(f'{self.folder}: {what}, {self.where()}, from step {self.step} to {self.config.steps}')
        if backend:
            say(f'{self.folder}: attention by {backend}')
        for row in self.yardsticks():
            say(f'yardstick: {row["bpb"]:.4f} bits per byte, {row["yardstick"]}')

    def where(self) -> str:
        layout = f'{self.ranks.dp} x {self.ranks.cp} x {self.ranks.tp}'
        processes = f', {layout} processes (data x context x tensor)' if self.ranks.mesh else ''
        return f'{self.device.type if self.ranks.mesh else self.device}{processes}'

    def start_wandb(self) -> None:
        try:
            import wandb  # pyright: ignore[reportMissingImports]
        except ImportError as error:
            raise UserError('--wandb: wandb is not installed (pip install wandb)') from error
        settings = {'id': self.folder.name, 'resume': 'allow', 'config': asdict(self.config)}
        self.wandb = wandb.init(project='native-sparse-attention', **settings)

    def yardsticks(self) -> list[dict[str, Any]]:
        return [row for row in self.rows if 'yardstick' in row]

    def end(self) -> None:
        """Print the last losses beside the yardsticks, the picture, and the command that samples."""
        last = {row['split']: row['bpb'] for row in self.rows if 'split' in row}
        seen = self.step * self.config.grad_accum * self.config.batch * self.config.seq_len
        for row in self.yardsticks():
            bits, limit = last[row['of']], row['bpb']
            reason = f' (it was trained on {seen:,} bytes only: --steps)' if bits >= limit else ''
            compared = f'{"below" if bits < limit else "above"} {limit:.4f}, {row["yardstick"]}'
            say(f'{row["of"]} {bits:.4f} bits per byte, {compared}{reason}')
        say(f'picture: {self.folder / "loss.png"}')
        say(f"text: python train_enwik8.py --sample {self.folder} --prompt 'The ' --tokens 2000")


def sparse_backend(model: nn.Module, x: Tensor) -> str | None:
    """Return the backend of sparse attention for x [B, T, dim], and why not a faster one; None for a dense model."""
    layer = next((m for m in model.modules() if isinstance(m, SparseAttention)), None)
    return None if layer is None else str(layer.backend_for(x))


def parameter_counts(model: nn.Module, twin: nn.Module) -> dict[str, int]:
    """Return the numbers of parameters: all, those of attention layers, and those that the dense twin lacks."""

    def count(module: nn.Module) -> int:
        return sum(p.numel() for p in module.parameters())

    layers = [m for m in model.modules() if isinstance(m, SparseAttention | DenseAttention)]
    return {'total': count(model), 'attention': sum(map(count, layers)), 'sparse only': count(model) - count(twin)}
