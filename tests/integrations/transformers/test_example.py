"""`examples/convert_llama.py`: every stage runs and is written, and the measures are correct."""

from __future__ import annotations

import json
import math
import random
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers, trainers
from tokenizers.decoders import ByteLevel
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast

from examples.convert_llama import Experiment, Text, coverage, covered_mass, load_text, main, parse, recall_row
from native_sparse_attention.integrations.transformers import NSAConfig, change_settings
from tests.support.hf_models import dense_model, nsa_model, random_ids

STAGES = ['dense', 'converted', 'warm-up', 'converted', 'warm-up', 'tuned', 'dense-tuned']


@pytest.fixture
def flags(tmp_path: Path) -> list[str]:
    """Arguments of a tiny run on a text of its own."""
    text = tmp_path / 'text'
    text.write_bytes(' '.join(random.Random(0).choices(('some', 'of', 'the', 'words'), k=4000)).encode())
    out = str(tmp_path / 'out')
    return ['--preset', 'tiny', '--device', 'cpu', '--pretrain-tokens', '10240', '--data', str(text), '--out', out]


def rows_of(flags: list[str]) -> list[dict[str, Any]]:
    return json.loads((Path(flags[-1]) / 'result.json').read_text())['rows']


def test_every_stage(flags: list[str], capsys: pytest.CaptureFixture[str]):
    assert main([*flags[:-2], '--pretrain-tokens', '50000', *flags[-2:]]) == 0
    rows, out = rows_of(flags), Path(flags[-1])
    assert [row['stage'] for row in rows] == STAGES
    assert [row.get('block_scores') for row in rows[1:5]] == ['rotated', 'rotated', 'plain', 'plain']
    assert all(math.isfinite(row['loss']) for row in rows)
    for row in (rows[1], rows[3]):
        assert row['loss_reading_all'] == pytest.approx(rows[0]['loss'], abs=1e-5)
        assert abs(row['loss'] - rows[0]['loss']) > 1e-5
    assert rows[2]['coverage'] != rows[1]['coverage'] or rows[4]['coverage'] != rows[3]['coverage']
    assert all(len(row['coverage']) == 2 and 0 < min(row['coverage']) < 1 for row in rows[1:6])
    best = max((rows[2], rows[4]), key=lambda row: sum(row['coverage']))
    assert rows[5]['block_scores'] == best['block_scores']
    assert rows[5]['tokens'] == rows[6]['tokens'] == 3072
    printed = capsys.readouterr().out
    assert printed.count('\n| ') == 2 + len(rows)
    tuned = AutoModelForCausalLM.from_pretrained(out / 'nsa')
    assert tuned.config.model_type == 'nsa_llama'
    assert tuned.config.nsa['num_selected_blocks'] == 4


@pytest.mark.full
def test_adapters_of_a_saved_model(flags: list[str]):
    main([*flags[:-1], first := flags[-1] + '0'])
    dense = rows_of([first])[0]
    tune = ['--tune-tokens', '1024', '--block-scores', 'plain', '--seeds', '0', '1', '--lora']
    tune += ['--dense-layers', '0', '--select-before-window']
    assert main(['--model', f'{first}/dense', *tune, *flags]) == 0
    rows = rows_of(flags)
    assert [row['stage'] for row in rows] == ['dense', *(['converted', 'warm-up', 'tuned', 'dense-tuned'] * 2)]
    assert rows[0]['loss'] == dense['loss']
    assert len(rows[3]['coverage']) == 1
    assert [row['seed'] for row in rows[1:]] == [0] * 4 + [1] * 4
    assert rows[3]['loss'] != rows[7]['loss']
    before = AutoModelForCausalLM.from_pretrained(f'{first}/dense').state_dict()
    converted = AutoModelForCausalLM.from_pretrained(Path(flags[-1]) / 'nsa')
    assert converted.config.nsa['select_before_window']
    after = converted.state_dict()
    changed = {name.split('.')[-2] for name in before if not torch.equal(before[name], after[name])}
    assert changed == {'q_proj', 'k_proj', 'v_proj', 'o_proj'}
    assert any('k_compress' in name for name in after)


def test_time_limit(flags: list[str], capsys: pytest.CaptureFixture[str]):
    """Too little time trains neither the dense model nor φ to the end; tuned models see the same rows."""
    limits = ['--time-limit', '1', '--warm-up-steps', '1000', '--block-scores', 'plain', '--tune-tokens', '1024']
    assert main([*flags, *limits]) == 0
    rows = rows_of(flags)
    assert [row['stage'] for row in rows] == ['dense', 'converted', 'warm-up', 'tuned', 'dense-tuned']
    assert 0 < rows[2]['tokens'] < 1000 * 512
    assert rows[3]['tokens'] == rows[4]['tokens'] == 1024
    assert f'perplexity {math.exp(rows[1]["loss"]):.3f}' in capsys.readouterr().out


@pytest.mark.parametrize(
    ('rate', 'message'),
    [
        ('--pretrain-rate', 'dense, step [23] of 20: the loss is'),
        ('--tune-rate', 'tuned, seed 0, step [23] of 6: the loss'),
    ],
)
def test_a_loss_that_is_not_finite_ends_the_run(flags: list[str], rate: str, message: str):
    with pytest.raises(SystemExit, match=message):
        main([*flags[:-2], rate, '1e30', *flags[-2:]])


@pytest.mark.parametrize(
    ('more', 'message'),
    [
        (['--length', '0'], '--length is 0, but must be positive'),
        (['--length', '5000'], 'must have more than 20 times --length 5000'),
        (['--time-limit', '0'], '--time-limit is 0, but must be positive'),
        (['--pairs', '20'], '--pairs is 20, but so many pairs'),
        (['--recall-share', '2'], '--recall-share is 2.0, but must be from 0 to 1'),
        (['--schedule', '2', '0'], 'but must have positive factors'),
        (['--budget', '10', '4', '16', '8', '4'], 'selection_block_size is 10'),
        (['--dense-layers', '2'], '--dense-layers is [2], but must leave some of 0 to 1'),
        (['--dense-layers', '0', '1'], '--dense-layers is [0, 1], but must leave some of 0 to 1'),
        (['--data', 'no-such-file'], "--data is 'no-such-file', but must be a file"),
        (['--preset', 'default', '--model', 'x'], '--tune-tokens is missing'),
    ],
)
def test_refused(flags: list[str], more: list[str], message: str, capsys: pytest.CaptureFixture[str]):
    with pytest.raises(SystemExit):
        main([*flags, *more])
    assert message in capsys.readouterr().err


def test_help(capsys: pytest.CaptureFixture[str]):
    with pytest.raises(SystemExit, match='0'):
        main(['--help'])
    assert '--tune-tokens' in capsys.readouterr().out


def test_recall_rows_ask_for_each_pair():
    text = Text(torch.zeros(500, dtype=torch.uint8), torch.zeros(500, dtype=torch.uint8), lambda s: list(s.encode()))
    ids, answers = recall_row(text, text.train, 256, 5, random.Random(0))
    row = bytes(ids.tolist())
    assert len(row) == 256
    assert len(answers) == 5
    pairs = [row[start - 7 : stop] for start, stop in answers]
    assert all(pair[:2] == b'\n@' and row.count(pair) == 2 for pair in pairs)
    assert len(set(pairs)) == 5
    assert answers[-1][1] == 256


class Copying(torch.nn.Module):
    """Predict the token that follows in the row, but for the first `wrong` tokens."""

    def __init__(self, wrong: int) -> None:
        super().__init__()
        self.wrong = wrong

    def forward(self, input_ids: Tensor, **_: Any) -> Any:
        following = input_ids.roll(-1, 1)
        following[:, : self.wrong] = 0
        return SimpleNamespace(logits=torch.nn.functional.one_hot(following, 256).float())


def test_recall_accuracy(flags: list[str]):
    options = parse(flags)[1]
    run = Experiment(options, load_text(options))
    assert run.recall_accuracy(Copying(0)) == 1.0
    assert run.recall_accuracy(Copying(256)) == 0.0
    first_two = run.recall[0][1][1][1] - 1  # the last token of the second answer, and all before, are wrong
    assert run.recall_accuracy(Copying(first_two)) == 0.5


def test_covered_mass():
    seqlen, heads = 300, 2
    q, k = torch.zeros(seqlen, 4, 8), torch.zeros(seqlen, heads, 8)  # equal weights
    blocks = torch.full((seqlen, heads, 3), -1, dtype=torch.int32)
    settings = NSAConfig(16, 3, 10, 8, 4)
    window = [min(10, t + 1) / (t + 1) for t in range(seqlen)]
    assert covered_mass(q, k, blocks, settings, 1.0) == pytest.approx(sum(window) / seqlen)
    blocks[:, 1, 0] = 1  # tokens 16 to 31, for the second KV head
    read = [len({*range(max(0, t - 9), t + 1), *range(16, min(32, t + 1))}) / (t + 1) for t in range(seqlen)]
    assert covered_mass(q, k, blocks, settings, 1.0) == pytest.approx((sum(window) + sum(read)) / 2 / seqlen)


@pytest.mark.parametrize('family', ['llama', 'qwen3'])
@pytest.mark.parametrize('scores', ['rotated', 'plain'])
def test_coverage(family: str, scores: str):
    model = nsa_model(family, NSAConfig(8, 4, 8, 4, 2, block_scores=scores))
    ids = random_ids(1, 120)
    few = coverage(model, ids)
    change_settings(model, num_selected_blocks=8)
    more = coverage(model, ids)
    change_settings(model, num_selected_blocks=15)
    assert all(0 < a < b < 1 for a, b in zip(few, more, strict=True))
    assert coverage(model, ids) == pytest.approx([1.0, 1.0])


@pytest.mark.full
def test_text_in_tokens_of_the_model(flags: list[str], tmp_path: Path):
    model, folder = dense_model('qwen2', vocab_size=300), tmp_path / 'model'
    model.save_pretrained(folder)
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer, tokenizer.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), ByteLevel()
    letters = pre_tokenizers.ByteLevel.alphabet()
    tokenizer.train([flags[-3]], trainers.BpeTrainer(vocab_size=280, initial_alphabet=letters, show_progress=False))
    PreTrainedTokenizerFast(tokenizer_object=tokenizer).save_pretrained(folder)
    text = load_text(parse([*flags, '--model', str(folder), '--length', '64'])[1])
    raw = Path(flags[-3]).read_text()
    assert tokenizer.decode(text.train.tolist()) + tokenizer.decode(text.valid.tolist()) == raw
    assert len(text.train) + len(text.valid) < len(raw) / 2
    assert main([*flags[:-2], '--model', str(folder), '--length', '64', '--pairs', '2', *flags[-2:]]) == 0
    assert [row['stage'] for row in rows_of(flags)] == STAGES
