"""How fast does a converted Hugging Face model train and generate, beside the dense model?

    python -m benchmarks.converted_model                                            minutes on a GPU
    python -m benchmarks.converted_model --cache static                     the decoding step compiled by transformers
    python -m benchmarks.converted_model --device cpu --shape tiny --out /tmp/results       to try the script

A Llama with random bfloat16 weights, dense with scaled_dot_product_attention, and converted by `convert_to_nsa` with
init='dense' (merged mode, block scores alone), with init='merged' (compressed output and a gate on the sum, blocks
before the window, plain scores, use_diff_topk) and with init='paper' (three branches, use_diff_topk). Training: forward
with a loss and backward of one row, without an optimizer. Generation: greedy, one row, milliseconds per token beyond
the first, by subtraction of a run that generates one token. Runs of the models are interleaved, medians are shown.
Writes <gpu>/converted-model.md and .json to --out.
"""

from __future__ import annotations

import gc
import statistics
import sys
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from benchmarks import report
from benchmarks.timing import peak, reset_peak, seconds_of
from native_sparse_attention.integrations.transformers import NSAConfig, convert_to_nsa


@dataclass(frozen=True)
class Model:
    """tokens: of the row. new_tokens: generated after it. blocks: compressed, stride, selection, n and W."""

    hidden: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    intermediate: int
    tokens: int
    new_tokens: int
    blocks: tuple[int, int, int, int, int] = (32, 16, 64, 16, 512)

    def config(self) -> LlamaConfig:
        return LlamaConfig(
            vocab_size=32_000,
            hidden_size=self.hidden,
            intermediate_size=self.intermediate,
            num_hidden_layers=self.layers,
            num_attention_heads=self.heads,
            num_key_value_heads=self.kv_heads,
            head_dim=self.head_dim,
            max_position_embeddings=self.tokens + self.new_tokens,
            rope_parameters={'rope_type': 'default', 'rope_theta': 500_000.0},
            tie_word_embeddings=True,
            bos_token_id=None,
            eos_token_id=None,
            pad_token_id=0,
        )


SHAPES = {
    '1b': Model(2048, 16, 32, 8, 64, 8192, 32_768, 32),
    '1b-heads-of-128': Model(2048, 16, 16, 4, 128, 8192, 32_768, 32),
    'tiny': Model(32, 2, 4, 2, 8, 64, 200, 4, (8, 4, 8, 5, 16)),
}
MERGED = {'init': 'merged', 'block_scores': 'plain', 'select_before_window': True, 'use_diff_topk': True}
KINDS = {
    'dense': None,
    'init=dense': {'init': 'dense'},
    'init=merged': MERGED,
    'init=paper': {'init': 'paper', 'use_diff_topk': True},
}


def build(shape: Model, kind: str, device: str) -> Any:
    """Return a model of `kind` with the same random weights for each kind."""
    torch.manual_seed(0)
    with torch.device(device):
        model: Any = LlamaForCausalLM(shape.config())
    model = model.to(torch.bfloat16)
    if (settings := KINDS[kind]) is not None:
        compress, stride, selection, n, window = shape.blocks
        sizes: dict[str, Any] = {'compress_block_size': compress, 'compress_block_sliding_stride': stride}
        sizes |= {'selection_block_size': selection, 'num_selected_blocks': n, 'sliding_window_size': window}
        model = convert_to_nsa(model, NSAConfig(**sizes, **settings))
    return model


def train_step(model: Any, ids: torch.Tensor) -> None:
    model.train()
    model(input_ids=ids, labels=ids, use_cache=False).loss.backward()
    model.zero_grad()


def generate(model: Any, ids: torch.Tensor, count: int, cache: str) -> None:
    model.eval()
    settings: dict[str, Any] = {'max_new_tokens': count, 'min_new_tokens': count, 'cache_implementation': cache}
    model.generate(ids, attention_mask=torch.ones_like(ids), do_sample=False, **settings)


def measure(shape: Model, device: str, repeats: int, cache: str) -> list[dict[str, Any]]:
    """Return a row for each kind of model."""
    models = {kind: build(shape, kind, device) for kind in KINDS}
    ids = torch.randint(1, 32_000, (1, shape.tokens), device=device)
    times: dict[tuple[str, str], list[float]] = {}
    peaks: dict[str, int] = {}
    for repeat in range(repeats + 1):  # the first compiles
        for kind, model in models.items():
            gc.collect()
            before = reset_peak(device)
            found = {'train': seconds_of(partial(train_step, model, ids), device)}
            peaks[kind] = peak(device) - before
            found['first'] = seconds_of(partial(generate, model, ids, 1, cache), device)
            found['all'] = seconds_of(partial(generate, model, ids, 1 + shape.new_tokens, cache), device)
            print(kind, repeat, {name: round(seconds, 3) for name, seconds in found.items()}, flush=True)
            if repeat > 0:
                for name, seconds in found.items():
                    times.setdefault((kind, name), []).append(seconds)
    rows = []
    for kind in KINDS:
        train, first, total = (statistics.median(times[kind, name]) for name in ('train', 'first', 'all'))
        rows.append(
            {
                'model': kind,
                'train_s': train,
                'tokens_per_s': shape.tokens / train,
                'train_peak': peaks[kind] or None,
                'first_token_s': first,
                'ms_per_token': 1000 * (total - first) / shape.new_tokens,
                'parameters': sum(p.numel() for p in models[kind].parameters()),
                'times': {name: times[kind, name] for name in ('train', 'first', 'all')},
            }
        )
    return rows


def main() -> int:
    parser = report.make_parser(__doc__)
    parser.add_argument('--shape', default='1b', choices=SHAPES, help='(%(default)s)')
    parser.add_argument('--repeats', type=int, default=3, help='after the first, which compiles (%(default)s)')
    parser.add_argument('--cache', default='dynamic', choices=('dynamic', 'static'), help='of generation (%(default)s)')
    options = parser.parse_args()
    where = report.machine(options.device, options.commit)
    shape = SHAPES[options.shape]
    rows = measure(shape, options.device, options.repeats, options.cache)
    columns = ('', 'parameters', 'training step s', 'tokens/s', 'peak GiB', 'prefill s', 'ms per token')
    body = [
        [
            row['model'],
            f'{row["parameters"]:,}',
            row['train_s'],
            f'{row["tokens_per_s"]:,.0f}',
            report.gib(row['train_peak']),
            row['first_token_s'],
            row['ms_per_token'],
        ]
        for row in rows
    ]
    about = (
        f'Llama, {shape.layers} layers, {shape.hidden} wide, {shape.heads}/{shape.kv_heads} heads of {shape.head_dim}, '
        f'{shape.tokens:,} tokens, {shape.new_tokens} generated, bfloat16; l/d/l′/n/W = '
        f'{"/".join(map(str, shape.blocks))}. peak: of the training step, beyond weights. prefill: with one token. '
        f'Cache: {options.cache}.'
    )
    tables = [about, report.table(columns, body)]
    title = 'Training and generation of a converted Llama beside the dense model'
    what = 'converted-model' if options.shape == '1b' else f'converted-model-{options.shape}'
    what += '-static' if options.cache == 'static' else ''
    report.write(options.out, where, what, title, tables, rows)
    print('\n\n'.join(tables))
    return 0


if __name__ == '__main__':
    sys.exit(main())
