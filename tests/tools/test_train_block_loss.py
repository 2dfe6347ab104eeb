"""The loss of block scores in training steps of the trainer."""

from __future__ import annotations

import contextlib
from pathlib import Path

import pytest
import torch

from tests.support.training_runs import command, write_words
from train_enwik8 import draw, open_run, parse


@pytest.mark.parametrize(
    ('flags', 'trained'),
    [
        (['--block-loss', '0.5'], 0.5),
        (['--block-loss', '0'], 0),
        (['--preset', 'long', '--attention', 'dense'], 0),  # the preset has a weight for sparse attention
    ],
)
def test_the_loss_of_block_scores_is_trained_and_not_logged(tmp_path: Path, flags: list[str], trained: float) -> None:
    options, given = parse(command(write_words(tmp_path), tmp_path / 'runs', *flags))
    with contextlib.ExitStack() as locks:
        run = open_run(options, given, locks)
    ids = draw(run.corpus.splits['train'], run.config, 0)[0]
    loss, total = run.losses(ids)
    assert loss == run.loss(ids)
    if not trained:
        assert total is loss
        return
    _, block_loss = run.model(ids, return_loss=True, return_block_loss=True)
    torch.testing.assert_close(total, loss + trained * block_loss)
    assert block_loss > 0
