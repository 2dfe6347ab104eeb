"""--sample: text by the model of a checkpoint, printed as it is generated."""

from __future__ import annotations

import argparse
import codecs
import os
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from native_sparse_attention.nn.transformer import Transformer
from trainer.config import Config
from trainer.console import UserError, as_user_error
from trainer.folder import load_checkpoint
from trainer.ranks import Ranks
from trainer.tensors import load_tensors, read_newest

Build = Callable[[Config, argparse.Namespace, Ranks], tuple[torch.device, Transformer]]


def sample(options: argparse.Namespace, given: dict[str, Any], build: Build) -> int:
    """Print what the model of a checkpoint writes after --prompt, byte by byte, and how fast; return the exit code.

    On a GPU the model runs in bfloat16, as it was trained. `given`: settings that replace those of the run.
    """
    prompt = b'\n' if options.prompt is None else os.fsencode(options.prompt)
    count = 512 if options.tokens is None else options.tokens
    if not prompt:
        raise UserError('--prompt: must have at least 1 byte')
    if count < 1:
        raise UserError(f'--tokens {count}: must be at least 1')
    state = load_checkpoint(options.sample)
    config = replace(state['config'], **given)
    device, model = build(config, options, Ranks())
    read_newest(options.sample, state, lambda state: load_tensors(options.sample / state['tensors'], model))
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
