"""The run of a call: a new folder, or the checkpoint that --resume or --check-decode names."""

from __future__ import annotations

import argparse
import contextlib
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from trainer.config import PRESETS, Config, spelled
from trainer.console import UserError
from trainer.corpus import Corpus, load_corpus
from trainer.folder import CHECKPOINT, find_run, load_checkpoint, lock_run, refuse_existing, run_folder


@dataclass
class Start:
    """A run that this call may train or check. `state`: its checkpoint, None for a new run."""

    config: Config
    preset: str
    folder: Path
    state: dict[str, Any] | None
    data: str | None  # None where no text was named, and no checkpoint names one
    limit: int  # bytes that an archive may unpack to
    named_text: bool  # by this call
    found: Corpus | None  # the text, where the name of the run depends on it

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), 'found': None}  # other processes get the text by itself

    def corpus(self, only_prompt: bool) -> Corpus:
        """Load the text; with `only_prompt` and no --data just the prompt that the checkpoint holds."""
        if only_prompt and self.state and not self.named_text:
            return Corpus(**self.state['corpus'], splits={'valid': self.state['prompt']})
        corpus = self.found or load_corpus(self.data, limit=self.limit)
        refuse_short(corpus, self.config)
        if self.state and corpus.sha256 != self.state['corpus']['sha256']:
            text = self.state['corpus']
            raise UserError(f'{corpus.data}: {self.folder} reads another text, {text["name"]} (--data {text["data"]})')
        return corpus


def find_start(options: argparse.Namespace, given: dict[str, Any], locks: contextlib.ExitStack) -> Start:
    """Return a new run, or with --resume or --check-decode the one of a checkpoint.

    A resumed run is locked until `locks` closes. The text is loaded here only where the name of the run depends on
    it, so that no refusal asks the network.

    Raises:
        UserError: the run exists, or does not, or has other settings, or another process holds it.
    """
    old, preset = options.resume or options.check_decode, options.preset
    folder = run_folder(options.runs_dir, options.name) if options.name else None
    preset = preset or ('base' if torch.cuda.is_available() else 'cpu')
    start = f'{preset}-{given.get("attention", Config().attention)}-'
    if old and folder is None and options.data is None:
        folder = find_run(options.runs_dir, start)
    limit, corpus, state = int(options.unpack_gib * 2**30), None, None
    if folder is None:
        corpus = load_corpus(options.data, limit=limit)
        folder = run_folder(options.runs_dir, start + corpus.name)
    if old:
        if options.resume and (folder / CHECKPOINT).exists():
            locks.enter_context(lock_run(folder))
        state = load_checkpoint(folder)
        refuse_changes(folder, state, {**({'preset': preset} if options.preset else {}), **given})
        preset, config = state['preset'], state['config']
    else:
        refuse_existing(folder)
        config = Config(**{**PRESETS[preset], **given})
    data = options.data or (state['corpus']['data'] if state else None)
    return Start(config, preset, folder, state, data, limit, options.data is not None, corpus)


def refuse_changes(folder: Path, state: dict[str, Any], asked: dict[str, Any]) -> None:
    held = {**asdict(state['config']), 'preset': state['preset']}
    for name, value in asked.items():
        if value != held[name]:
            raise UserError(f'{spelled(name)} {value}: {folder} has {held[name]}, and a run keeps its settings')


def refuse_short(corpus: Corpus, config: Config) -> None:
    needed = {'train': config.seq_len + 1, 'valid': 2, 'test': 2}
    for split, text in corpus.splits.items():
        size = len(text if split == 'train' else text[: config.eval_bytes or None])
        if size < needed[split]:
            why = f'--seq-len {config.seq_len}' if split == 'train' else 'an evaluation'
            raise UserError(f'{corpus.data}: {size:,} bytes in split {split}, but {why} needs {needed[split]:,}')
