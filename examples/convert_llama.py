"""Turn a dense Hugging Face model into one with Native Sparse Attention, train it, and compare it with the dense one.

    python examples/convert_llama.py                                    trains a dense byte model first; needs a GPU
    python examples/convert_llama.py --model PATH --data FILE --tune-tokens 20_000_000
    python examples/convert_llama.py --preset tiny                      seconds on a CPU, to try the script

Stages, each with its loss on held-out text and the share of right answers in a recall task:

    dense        the dense model
    converted    after `convert_to_nsa`, before any training, with block scores of rotated and of plain queries and keys
    warm-up      after training φ alone towards the attention mass of the blocks, the other weights frozen
    tuned        after training all weights (adapters with --lora), from a large budget of blocks to the final one
    dense-tuned  the dense model after as many tokens

Block scores with the better coverage after the warm-up are tuned. Coverage: share of the attention mass of all keys
that lies on the keys read, by layer. Recall task: a text with random pairs @key=value, which come again at its end.
Writes result.json, and the models in folders dense and nsa, to --out.
"""

from __future__ import annotations

import argparse
import copy
import importlib.util
import json
import math
import random
import string
import sys
import sysconfig
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from statistics import fmean
from typing import Any, NamedTuple

import torch
import transformers
from torch import Tensor

from native_sparse_attention.integrations.transformers import (
    NSAConfig,
    change_settings,
    collect_block_losses,
    convert_to_nsa,
)
from native_sparse_attention.ops import compressed_attention, select_blocks

PYTHON_SOURCES = 'python-sources'
TUNED_SHARE = 0.02  # of the tokens that trained the dense model
TIME_SHARES = {'dense': 0.4, 'warm-up': 0.15}  # of --time-limit, at most
QUERY_CHUNK = 256  # queries whose attention weights are in memory at once
SIZES = ('hidden_size', 'intermediate_size', 'num_hidden_layers', 'num_attention_heads', 'num_key_value_heads')
# Defaults of a preset. sizes: of the byte-level Llama, in the order of SIZES. budget: first arguments of NSAConfig.
PRESETS: dict[str, dict[str, Any]] = {
    'default': {
        'length': 8192, 'batch': 8, 'sizes': (512, 1536, 8, 8, 4), 'budget': (64, 16, 512, 32, 16),
        'pretrain_tokens': 250_000_000, 'warm_up_steps': 300, 'pairs': 64, 'eval_rows': 32, 'max_bytes': 200_000_000,
    },
    'tiny': {
        'length': 256, 'batch': 2, 'sizes': (32, 64, 2, 4, 2), 'budget': (16, 4, 16, 8, 4),
        'pretrain_tokens': 102_400, 'tune_tokens': 3072, 'pretrain_rate': 1e-2, 'warm_up_steps': 6, 'pairs': 4,
        'eval_rows': 2, 'max_bytes': 200_000,
    },
}  # fmt: skip


class Text(NamedTuple):
    """Token ids `[N]` of two splits, and the function that encodes a string."""

    train: Tensor
    valid: Tensor
    encode: Callable[[str], list[int]]


def read_bytes(data: str, limit: int) -> bytearray:
    """Return the text that --data names: a file, the files of a folder, or the Python files of this interpreter."""
    path = Path(data)
    if data == PYTHON_SOURCES:
        roots = {Path(sysconfig.get_path(name)) for name in ('stdlib', 'purelib')}
        files = sorted({file for root in roots for file in root.rglob('*.py')})
    elif path.is_dir():
        files = sorted(file for file in path.rglob('*') if file.is_file() and not file.name.startswith('.'))
    elif path.is_file():
        files = [path]
    else:
        raise ValueError(f'--data is {data!r}, but must be a file, a folder or {PYTHON_SOURCES!r}')
    random.Random(0).shuffle(files)
    content = bytearray()
    for file in files:
        with file.open('rb') as stream:
            content += stream.read(limit - len(content))
    return content


def load_text(options: argparse.Namespace) -> Text:
    """Return the text in tokens of the model: of its own tokenizer if it has one, else bytes."""
    raw = read_bytes(options.data, options.max_bytes)
    folder = Path(options.model or '.')
    if options.model and (not folder.exists() or any(folder.glob('tokenizer*'))):
        tokenizer: Any = transformers.AutoTokenizer.from_pretrained(options.model)
        content = raw.decode('utf-8', errors='replace')

        def encode(piece: str) -> list[int]:
            return tokenizer(piece, add_special_tokens=False)['input_ids']

        tokens = torch.tensor([i for at in range(0, len(content), 2**20) for i in encode(content[at : at + 2**20])])
        tokens = tokens.int()
    else:

        def encode(piece: str) -> list[int]:
            return list(piece.encode())

        tokens = torch.frombuffer(raw, dtype=torch.uint8)
    cut = len(tokens) * 95 // 100
    if len(tokens) - cut <= options.length:
        raise ValueError(f'--data has {len(tokens)} tokens, but must have more than 20 times --length {options.length}')
    return Text(tokens[:cut], tokens[cut:], encode)


def text_row(tokens: Tensor, length: int, rng: random.Random) -> Tensor:
    start = rng.randrange(len(tokens) - length)
    return tokens[start : start + length].long()


def recall_row(
    text: Text, tokens: Tensor, length: int, pairs: int, rng: random.Random
) -> tuple[Tensor, list[tuple[int, int]]]:
    """Return a text `[T]` with pairs of key and value, all of which come again at its end, and (start, stop) of the
    values there.
    """
    values: dict[str, str] = {}
    while len(values) < pairs:
        key, value = (''.join(rng.choices(string.ascii_lowercase, k=4)) for _ in range(2))
        values[key] = value
    facts = [(text.encode(f'\n@{key}='), text.encode(value)) for key, value in values.items()]
    filler = length - 2 * sum(len(key) + len(value) for key, value in facts)
    if filler < 0:
        raise ValueError(f'--pairs is {pairs}, but so many pairs, twice, must fit in the {length} tokens of --length')
    around = text_row(tokens, filler, rng)
    cuts = sorted(rng.randint(0, filler) for _ in facts)
    pieces = [around[: cuts[0]]]
    for (key, value), start, stop in zip(facts, cuts, [*cuts[1:], filler], strict=True):
        pieces += [torch.tensor(key + value), around[start:stop]]
    answers, at = [], sum(map(len, pieces))
    for key, value in rng.sample(facts, pairs):
        pieces.append(torch.tensor(key + value))
        at += len(key) + len(value)
        answers.append((at - len(value), at))
    return torch.cat(pieces), answers


class Experiment:
    """State that the stages share: settings, text, held-out rows, and the rows of the result."""

    def __init__(self, options: argparse.Namespace, text: Text) -> None:
        self.options, self.text = options, text
        self.rows: list[dict[str, Any]] = []  # of the result
        self.started = time.perf_counter()
        rng, length = random.Random(0), options.length
        self.valid = [text_row(text.valid, length, rng) for _ in range(options.eval_rows)]
        self.recall = [recall_row(text, text.valid, length, options.pairs, rng) for _ in self.valid]

    def autocast(self) -> torch.autocast:
        return torch.autocast(kind := self.options.device.split(':')[0], torch.bfloat16, enabled=kind == 'cuda')

    def batch(self, name: str, step: int) -> Tensor:
        """Return the rows `[B, T]` of a step, the same for each model."""
        options, rng = self.options, random.Random(f'{name} {step}')
        rows = []
        for _ in range(options.batch):
            if rng.random() < options.recall_share:
                rows.append(recall_row(self.text, self.text.train, options.length, options.pairs, rng)[0])
            else:
                rows.append(text_row(self.text.train, options.length, rng))
        return torch.stack(rows).to(options.device)

    @torch.no_grad()
    def loss(self, model: Any, where: str) -> float:
        """Return the mean loss of held-out text in nats per token."""
        model.eval()
        losses = []
        for row in self.valid:
            ids = row[None].to(self.options.device)
            with self.autocast():
                losses.append(finite(model(input_ids=ids, labels=ids, use_cache=False).loss, where))
        return fmean(losses)

    @torch.no_grad()
    def recall_accuracy(self, model: Any) -> float:
        """Return the share of values all of whose tokens are the most likely ones, given those before."""
        model.eval()
        right = []
        for ids, answers in self.recall:
            with self.autocast():
                logits = model(input_ids=ids[None].to(self.options.device), use_cache=False).logits
            best = logits[0].argmax(-1).cpu()
            right += [torch.equal(best[start - 1 : stop - 1], ids[start:stop]) for start, stop in answers]
        return sum(right) / len(right)

    def record(self, stage: str, model: Any, **more: Any) -> dict[str, Any]:
        """Measure a model, print the row and write the result."""
        row = {'stage': stage, **more, 'loss': self.loss(model, stage), 'recall': self.recall_accuracy(model)}
        row['coverage'] = coverage(model, self.valid[0][None].to(self.options.device))
        self.rows.append(row)
        seconds, perplexity = time.perf_counter() - self.started, math.exp(row['loss'])
        print(f'[{seconds:.0f} s] {stage}: loss {row["loss"]:.4f}, perplexity {perplexity:.3f}', flush=True)
        versions = {'torch': torch.__version__, 'transformers': transformers.__version__}
        result = {'settings': {**vars(self.options), 'out': None}, **versions, 'rows': self.rows}
        self.options.out.mkdir(parents=True, exist_ok=True)
        (self.options.out / 'result.json').write_text(json.dumps(result, indent=1))
        return row

    def train(
        self, stage: str, data: str, model: Any, loss_of: Callable[[Tensor, float], Tensor], steps: int, rate: float
    ) -> int:
        """Train the parameters that require gradients, and return how many tokens did.

        data: names the rows. loss_of: loss of rows `[B, T]`, at a share of the steps or of the time.
        """
        seconds = self.options.time_limit * TIME_SHARES.get(data.split()[0], math.inf)
        trained = [p for p in model.parameters() if p.requires_grad]
        optimizer = torch.optim.AdamW(trained, lr=rate, betas=(0.9, 0.95), weight_decay=0.1)
        model.train()
        started, warm = time.perf_counter(), max(1, steps // 20)
        for step in range(steps):
            if (share := max(step / steps, (time.perf_counter() - started) / seconds)) >= 1:
                print(f'  {stage}: ends after step {step} of {steps} by --time-limit', flush=True)
                return step * self.options.batch * self.options.length
            cosine = 0.55 + 0.45 * math.cos(math.pi * share)
            for group in optimizer.param_groups:
                group['lr'] = rate * min(1.0, (step + 1) / warm) * cosine
            with self.autocast():
                loss = loss_of(self.batch(data, step), share)
            value = finite(loss, f'{stage}, step {step + 1} of {steps}')
            loss.backward()
            torch.nn.utils.clip_grad_norm_(trained, 1.0)
            optimizer.step()
            optimizer.zero_grad()
            if step % max(1, steps // 20) == 0 or step == steps - 1:
                speed = (time.perf_counter() - started) / (step + 1)
                print(f'  {stage}: step {step + 1} of {steps}, loss {value:.4g}, {speed:.3f} s a step', flush=True)
        return steps * self.options.batch * self.options.length


def finite(loss: Tensor, where: str) -> float:
    """Return the loss, or end the script where it is not finite."""
    value = loss.item()
    if not math.isfinite(value):
        raise SystemExit(f'{where}: the loss is {value}')
    return value


@torch.no_grad()
def coverage(model: Any, ids: Tensor) -> list[float]:
    """Return, for each converted layer, the share of the attention mass of all keys that lies on the keys it reads.

    The mean over heads and queries, in float32, of the layer's own queries and keys in a row ids `[1, T]`.
    """
    found: list[float] = []

    def measure(layer: Any, _: Any, inputs: dict[str, Any]) -> None:
        tokens = layer.project(*(inputs[name] for name in ('hidden_states', 'position_embeddings', 'nsa_layout')))
        k_cmp, nsa, logits = layer.k_compress(tokens.raw_k), layer.nsa, layer.logit_settings
        size, stride = nsa.compress_block_size, nsa.compress_block_sliding_stride
        selection = {name: value for name, value in layer.sparse_settings.items() if name != 'merge_window'}
        selection |= {'compress_block_size': size, 'compress_stride': stride}
        _, lse = compressed_attention(tokens.q_cmp, k_cmp, k_cmp, block_size=size, stride=stride, **logits)
        blocks = select_blocks(tokens.q_cmp, k_cmp, lse, **selection, **logits)
        found.append(covered_mass(tokens.q[0], tokens.k[0], blocks[0], nsa, layer.scaling, logits['softcap']))

    layers = (module for module in model.modules() if hasattr(module, 'k_compress'))
    hooks = [layer.register_forward_pre_hook(measure, with_kwargs=True) for layer in layers]
    model.eval()
    model.base_model(input_ids=ids, use_cache=False)
    for hook in hooks:
        hook.remove()
    return found


def covered_mass(
    q: Tensor, k: Tensor, blocks: Tensor, nsa: NSAConfig, scale: float, softcap: float | None = None
) -> float:
    """Return the mean share of the causal attention weights on the keys of selected blocks and window.

    q: `[T, HQ, D]`. k: `[T, H, D]`. blocks: `[T, H, n]`, padded with -1.
    """
    seqlen, kv_heads = k.shape[:2]
    q = q.unflatten(1, (kv_heads, -1))
    num_blocks, total = -(-seqlen // nsa.selection_block_size), 0.0
    for start in range(0, seqlen, QUERY_CHUNK):
        stop = min(start + QUERY_CHUNK, seqlen)
        position = torch.arange(seqlen, device=q.device)
        distance = (position[start:stop, None] - position[:stop])[:, None]  # [t, 1, s]
        logits = torch.einsum('thgd,shd->thgs', q[start:stop], k[:stop]) * scale
        if softcap is not None:
            logits = softcap * (logits / softcap).tanh()
        weights = logits.masked_fill(distance[:, :, None] < 0, -torch.inf).softmax(-1).mean(2)
        chosen = blocks[start:stop].long()
        chosen = chosen.where(chosen >= 0, num_blocks)
        is_read = torch.zeros(stop - start, kv_heads, num_blocks + 1, dtype=torch.bool, device=q.device)
        is_read = is_read.scatter(-1, chosen, True)[..., :-1].repeat_interleave(nsa.selection_block_size, -1)
        total += (weights * (is_read[..., :stop] | (distance < nsa.sliding_window_size))).sum().item()
    return total / (seqlen * kv_heads)


def language_loss(model: Any, ids: Tensor, share: float = 0.0) -> Tensor:
    return model(input_ids=ids, labels=ids, use_cache=False).loss


def block_loss(model: Any, ids: Tensor, share: float = 0.0) -> Tensor:
    with collect_block_losses(model) as losses:
        model.base_model(input_ids=ids, use_cache=False)
    return torch.stack(losses).mean()


def dense_model(run: Experiment) -> Any:
    """Return the model of --model, or train one on bytes."""
    options = run.options
    if options.model:
        model: Any = transformers.AutoModelForCausalLM.from_pretrained(options.model, dtype=torch.float32)
        if model.config.vocab_size <= (largest := int(run.text.train.max())):
            raise ValueError(f'--model has {model.config.vocab_size} tokens, but the text has token {largest}')
        layers_of(options, model.config)
        return model.to(options.device)
    torch.manual_seed(options.seeds[0])
    settings = {'vocab_size': 256, 'tie_word_embeddings': True, 'bos_token_id': None, 'eos_token_id': None}
    rotary = {'rope_type': 'default', 'rope_theta': 500_000.0}
    settings |= {'max_position_embeddings': options.length, 'rope_parameters': rotary}
    config = transformers.LlamaConfig(**dict(zip(SIZES, options.sizes, strict=True)), **settings)
    layers_of(options, config)  # before the training
    model = transformers.LlamaForCausalLM(config).to(options.device)
    steps = steps_for(options.pretrain_tokens, options)
    print(f'dense: {sum(p.numel() for p in model.parameters()):,} parameters, {steps} steps', flush=True)
    run.train('dense', 'dense', model, partial(language_loss, model), steps, options.pretrain_rate)
    model.save_pretrained(options.out / 'dense')
    return model


def steps_for(tokens: int, options: argparse.Namespace) -> int:
    return max(1, round(tokens / (options.batch * options.length)))


def layers_of(options: argparse.Namespace, config: Any) -> list[int] | None:
    """Return the layers to convert, or None for all with full attention; refuses wrong --dense-layers."""
    kinds = getattr(config, 'layer_types', None) or ['full_attention'] * config.num_hidden_layers
    layers = [i for i, kind in enumerate(kinds) if kind == 'full_attention' and i not in options.dense_layers]
    if options.dense_layers and not (layers and {*options.dense_layers} <= {*range(len(kinds))}):
        raise ValueError(f'--dense-layers is {options.dense_layers}, but must leave some of 0 to {len(kinds) - 1}')
    return layers if options.dense_layers else None


def config_of(options: argparse.Namespace, **more: Any) -> NSAConfig:
    return NSAConfig(*options.budget).replace(select_before_window=options.select_before_window, **more)


def best_scores(run: Experiment, dense: Any, seed: int) -> tuple[str, Any]:
    """Convert with each kind of block scores, warm φ up, and return the kind and the model with more coverage."""
    options, best = run.options, ('', None, 0.0)
    for scores in options.block_scores:
        config, where = config_of(options, block_scores=scores), {'seed': seed, 'block_scores': scores}
        torch.manual_seed(seed)
        model: Any = convert_to_nsa(copy.deepcopy(dense), config, layers_of(options, dense.config))
        change_settings(model, sliding_window_size=options.length)
        reading_all = run.loss(model, f'converted, {scores} scores, reading all keys')
        change_settings(model, sliding_window_size=config.sliding_window_size)
        run.record('converted', model, **where, loss_reading_all=reading_all)
        for name, parameter in model.named_parameters():
            parameter.requires_grad_('k_compress' in name)
        name, steps = f'warm-up of {scores} scores, seed {seed}', options.warm_up_steps
        tokens = run.train(name, f'warm-up {seed}', model, partial(block_loss, model), steps, options.warm_up_rate)
        model.requires_grad_(True)
        row = run.record('warm-up', model, **where, tokens=tokens)
        if (covered := fmean(row['coverage'])) > best[2]:
            best = (scores, model, covered)
    return best[:2]


def tune(run: Experiment, model: Any, stage: str, seed: int, **more: Any) -> Any:
    """Train all weights or adapters of a model, converted or dense, and return the model with adapters merged."""
    options, is_sparse = run.options, stage == 'tuned'
    adapted: Any = None
    if options.lora:
        import peft

        added = ['k_compress'] if is_sparse else None
        targets = ['q_proj', 'k_proj', 'v_proj', 'o_proj']
        adapted = peft.get_peft_model(model, peft.LoraConfig(target_modules=targets, modules_to_save=added, r=16))
        model = adapted.get_base_model()
    config, schedule = config_of(options), options.schedule

    def set_budget(factor: int) -> None:
        blocks, window = config.num_selected_blocks * factor, config.sliding_window_size * factor
        change_settings(model, num_selected_blocks=blocks, sliding_window_size=window)

    def loss_of(ids: Tensor, share: float) -> Tensor:
        if not is_sparse:
            return language_loss(model, ids)
        set_budget(schedule[int(share * len(schedule))])
        with collect_block_losses(model) as losses:
            loss = language_loss(model, ids)
        return loss + options.score_weight * torch.stack(losses).mean()

    name, steps = f'{stage}, seed {seed}', steps_for(options.tune_tokens, options)
    tokens = run.train(name, f'tuning {seed}', model, loss_of, steps, options.tune_rate)
    if is_sparse:
        set_budget(1)
    run.record(stage, model, seed=seed, **more, tokens=tokens)
    return model if adapted is None else adapted.merge_and_unload()


def table(rows: list[dict[str, Any]]) -> str:
    """Return the result as a Markdown table. The loss is also given relative to the dense model of the stage."""
    columns = ('stage', 'seed', 'block scores', 'loss', '− dense', 'perplexity', 'recall', 'coverage', 'lowest layer')
    lines = ['| ' + ' | '.join(columns) + ' |', '|' + ' --- |' * len(columns)]
    dense = next(row for row in rows if row['stage'] == 'dense')
    tuned = {row['seed']: row for row in rows if row['stage'] == 'dense-tuned'}
    for row in rows:
        base = tuned.get(row['seed'], dense) if row['stage'] == 'tuned' else dense
        cells = [row['stage'], row.get('seed', ''), row.get('block_scores', '')]
        cells += [f'{row["loss"]:.4f}', f'{row["loss"] - base["loss"]:+.4f}', f'{math.exp(row["loss"]):.3f}']
        cells.append(f'{row["recall"]:.1%}')
        shares = row['coverage']
        cells += [f'{fmean(shares):.1%}', f'{min(shares):.1%}'] if shares else ['', '']
        lines.append('| ' + ' | '.join(map(str, cells)) + ' |')
    return '\n'.join(lines)


def parse(arguments: Sequence[str] | None) -> tuple[argparse.ArgumentParser, argparse.Namespace]:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add('--preset', choices=PRESETS, default='default', help='sizes (%(default)s)')
    add('--out', type=Path, default=Path('runs/convert'), help='folder of the result (%(default)s)')
    add('--model', help='dense model by its path or name; without it a byte-level Llama is trained')
    add('--data', default=PYTHON_SOURCES, help=f'a file, a folder or {PYTHON_SOURCES} (%(default)s)')
    add('--device', default='cuda' if torch.cuda.is_available() else 'cpu', help='(%(default)s)')
    add('--seeds', type=int, nargs='+', default=[0], help='conversion and tuning run once for each (%(default)s)')
    add('--block-scores', nargs='+', choices=('rotated', 'plain'), default=['rotated', 'plain'], help='(both)')
    add('--lora', action='store_true', help='tune adapters and φ alone, with peft')
    add('--length', type=int, help='tokens of a row')
    add('--batch', type=int, help='rows of a step')
    add('--budget', type=int, nargs=5, metavar=("l'", 'n', 'W', 'l', 'd'), help='first arguments of NSAConfig')
    add('--dense-layers', type=int, nargs='+', default=[], help='layers that are not converted (none)')
    add('--select-before-window', action='store_true', help='select blocks before the window alone')
    add('--pretrain-tokens', type=int, help='that train the dense model')
    add('--tune-tokens', type=int, help=f'that tune the models (with --model required, else {TUNED_SHARE} of them)')
    add('--warm-up-steps', type=int, help='that train φ alone')
    add('--time-limit', type=int, default=10**9, help='seconds that the run may take; ends some training early (none)')
    add('--schedule', type=int, nargs='+', default=[4, 2, 1, 1], help='factors of n and W, for equal parts of tuning')
    add('--recall-share', type=float, default=0.1, help='share of rows with the recall task (%(default)s)')
    add('--pairs', type=int, help='of key and value in a row of the recall task')
    add('--score-weight', type=float, default=0.01, help='of the block loss in tuning (%(default)s)')
    add('--pretrain-rate', type=float, default=1e-3, help='peak learning rate (%(default)s)')
    add('--warm-up-rate', type=float, default=1e-3, help='(%(default)s)')
    add('--tune-rate', type=float, default=1e-4, help='(%(default)s)')
    add('--eval-rows', type=int, help='rows of held-out text, and of the recall task')
    add('--max-bytes', type=int, help='of the text')
    parser.set_defaults(**PRESETS[parser.parse_known_args(arguments)[0].preset])
    options = parser.parse_args(arguments)
    if options.tune_tokens is None and not options.model:
        options.tune_tokens = round(TUNED_SHARE * options.pretrain_tokens)
    if options.tune_tokens is None:
        parser.error('--tune-tokens is missing, but is required with --model')
    for name, value in vars(options).items():
        if type(value) is int and value < 1:
            parser.error(f'--{name.replace("_", "-")} is {value}, but must be positive')
    if min(options.schedule) < 1:
        parser.error(f'--schedule is {options.schedule}, but must have positive factors')
    if not 0 <= options.recall_share <= 1:
        parser.error(f'--recall-share is {options.recall_share}, but must be from 0 to 1')
    if options.lora and importlib.util.find_spec('peft') is None:
        parser.error('--lora needs peft: pip install peft')
    return parser, options


def main(arguments: Sequence[str] | None = None) -> int:
    parser, options = parse(arguments)
    try:
        config_of(options)
        run = Experiment(options, load_text(options))
        dense = dense_model(run)
    except ValueError as error:
        parser.error(str(error))
    run.record('dense', dense)
    for seed in options.seeds:
        scores, model = best_scores(run, dense, seed)
        model = tune(run, model, 'tuned', seed, block_scores=scores)
        if seed == options.seeds[0]:
            model.save_pretrained(options.out / 'nsa')
        tune(run, copy.deepcopy(dense), 'dense-tuned', seed)
    print(table(run.rows))
    return 0


if __name__ == '__main__':
    sys.exit(main())
