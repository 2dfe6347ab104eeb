"""The variants that `benchmarks.learning` trains: what they are called, and the model that each one is."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, field, replace
from inspect import signature
from math import ceil
from typing import Any

import torch
from torch import nn

from benchmarks.learning_layers import (
    DetachedScores,
    DetachedScoresWithWindow,
    EveryBlockRows,
    FarField,
    FirstChoice,
    FirstChoiceOf64,
    FlooredGate,
    HeaviestBlocks,
    RandomBlocks,
    RotatedScores,
    SharedGate,
    WithWindow,
)
from native_sparse_attention import SparseAttention
from native_sparse_attention.nn.compress import MeanPool, MeanResidualMLP
from native_sparse_attention.nn.dense import DenseAttention
from native_sparse_attention.nn.transformer import Transformer

ALL = -1  # of selected blocks or of the window: as many as the sequence has
SPARSE = {
    'compress_block_size': 32,
    'compress_block_sliding_stride': 16,
    'selection_block_size': 64,
    'sliding_window_size': 512,
    'num_selected_blocks': 16,
    'compress_mlp_expand_factor': 0.125,
    'use_diff_topk': True,
}
# Layers of a model that alternates between them: near keys alone, far keys alone (with the blocks forced to be local).
LOCAL = {'merge_window': True, 'compressed_output': False, 'num_selected_blocks': 0, 'use_diff_topk': False}
FAR = {'sliding_window_size': 1}
# Gate logits of the compressed output, nearly shut, and of the whole output.
SHUT = (-6.0, 2.0)
GATES = ('to_strategy_combine', 'output_gate', 'window_gate')  # modules whose sigmoid is a gate
NETWORKS = ('k_compress', 'v_compress')


@dataclass(frozen=True)
class Variant:
    """How a model differs from the plain dense or sparse one.

    settings: arguments of `SparseAttention` beyond SPARSE; ALL: as many as cover the sequence.
    gate_start: gate logits of a head at the start. freeze_gates: gates are not trained.
    gate: makes the gate of a layer from (dim, heads), if not the package's.
    phi: the MLP ('mlp'), the block mean plus an MLP that starts at 0 ('mean'), or the block mean ('block-mean').
    gate_lr, phi_lr: factors on the learning rate of gates and of the networks φ. gate_decay: weight decay on gates.
    layers: class of the attention layers, if not that of the package.
    layer_settings: by index of the layer 'dense', or settings of its own.
    dense_share: share of the steps, at the start, in which the window covers the sequence (merged: dense attention).
    block_loss: weight of the loss that teaches block scores the mass of full attention (`block_score_loss`).
    wide: feed-forward networks are wider, so that the dense model has as many parameters as variant `separate`.
    """

    about: str
    kind: str = 'sparse'
    settings: Mapping[str, Any] = field(default_factory=dict)
    gate_start: tuple[float, ...] | None = None
    freeze_gates: bool = False
    gate: Callable[[int, int], nn.Module] | None = None
    phi: str = 'mlp'
    output_gate: bool = False
    gate_lr: float = 1.0
    phi_lr: float = 1.0
    gate_decay: bool = True
    layers: type[SparseAttention | DenseAttention] | None = None
    layer_settings: Mapping[int, Any] = field(default_factory=dict)
    wide: bool = False
    block_loss: float = 0.0
    dense_share: float = 0.0

    @property
    def cost(self) -> float:
        """Rough time of a step relative to dense attention, to start the longest jobs first."""
        return 1.0 if self.kind == 'dense' else 2.0


def _variants() -> dict[str, Variant]:
    every = {'num_selected_blocks': ALL}
    merged, scores = {'merge_window': True}, {'merge_window': True, 'compressed_output': False}
    before = {'select_before_window': True}
    gated = {**merged, **before, 'output_gate': True}
    alone = {'settings': {**every, 'use_diff_topk': False}, 'gate_start': (-20.0, 20.0, -20.0), 'freeze_gates': True}
    variants = {
        'dense': Variant('full attention', 'dense'),
        'dense-gated': Variant('full attention, a gate per head on its output', 'dense', output_gate=True),
        'dense-wide': Variant('full attention, as many parameters as separate', 'dense', wide=True),
        'separate': Variant('the paper, three gated branches'),
        'separate-all': Variant('every block selected', settings=every),
        'separate-selected-alone': Variant(
            'every block selected, gates fixed at (0, 1, 0), use_diff_topk off: the function of dense', **alone
        ),
        'separate-selected-alone-diff': Variant(
            'the same with use_diff_topk', **{**alone, 'settings': {**every, 'use_diff_topk': True}}
        ),
        'separate-gates-zero': Variant('gate logits start at (0, 0, 0)', gate_start=(0.0, 0.0, 0.0)),
        'separate-selected-open': Variant('gate logits start at (-2, 2, -2)', gate_start=(-2.0, 2.0, -2.0)),
        'separate-both-open': Variant('gate logits start at (-2, 2, 2)', gate_start=(-2.0, 2.0, 2.0)),
        'separate-gate-lr10': Variant('learning rate of gates × 10', gate_lr=10.0),
        'separate-gate-lr01': Variant('learning rate of gates × 0.1', gate_lr=0.1),
        'separate-gate-no-decay': Variant('no weight decay on gates', gate_decay=False),
        'separate-phi-lr3': Variant('learning rate of the networks φ × 3', phi_lr=3.0),
        'separate-gate-floor': Variant('the selected gate stays above 0.1', gate=FlooredGate),
        'separate-one-gate': Variant('one gate for the selected and the window branch', gate=SharedGate),
        'separate-independent-kv': Variant('keys and values per branch', settings={'independent_branch_kv': True}),
        'separate-mean-phi': Variant('φ starts as the block mean', phi='mean'),
        'separate-mean-phi-gate-floor': Variant(
            'φ starts as the block mean, the selected gate stays above 0.1', phi='mean', gate=FlooredGate
        ),
        'separate-local0': Variant('no local blocks forced', settings={'num_local_blocks': 0}),
        'separate-first-dense': Variant('full attention in the first layer', layer_settings={0: 'dense'}),
        'alternating': Variant(
            'window layers and layers of compressed and selected attention in turn, whose selected gate starts open',
            layer_settings={0: LOCAL, 1: FAR, 2: LOCAL, 3: FAR, 4: LOCAL, 5: FAR},
            gate_start=(-2.0, 2.0, -2.0),
        ),
        'alternating-window': Variant(
            'window layers and layers of three branches in turn', layer_settings={0: LOCAL, 2: LOCAL, 4: LOCAL}
        ),
        'alternating-merged': Variant(
            'window layers and merged layers in turn',
            settings=merged,
            layer_settings={0: LOCAL, 2: LOCAL, 4: LOCAL},
        ),
        'window-all': Variant('the window over everything', settings={'sliding_window_size': ALL}),
        'merged-window': Variant('merged, plus a gated window', settings=merged, layers=WithWindow),
        'merged-scores-window': Variant(
            'merged-scores with φ a block mean, plus a gated window', settings=scores, phi='mean', layers=WithWindow
        ),
        'merged-scores-detached': Variant(
            'merged-scores with φ a block mean at the start, which alone is trained by use_diff_topk',
            settings=scores,
            phi='mean',
            layers=DetachedScores,
        ),
        'merged-detached': Variant(
            'the same of merged: queries and keys learn from selected attention alone, values from both',
            settings=merged,
            phi='mean',
            layers=DetachedScores,
        ),
        'merged-mlp-detached': Variant(
            'merged with an MLP as φ: queries and keys learn from selected attention alone, values from both',
            settings=merged,
            layers=DetachedScores,
        ),
        'merged-far-field': Variant(
            'merged-scores, block means of rotated keys and of values in the same softmax',
            settings=scores,
            layers=FarField,
        ),
        'merged-far-field-far': Variant(
            'the same, blocks are selected before the window alone',
            settings={**scores, **before},
            layers=FarField,
        ),
        'merged-rotated': Variant(
            'merged, queries and compressed keys with rotary embedding', settings=merged, layers=RotatedScores
        ),
        'merged-far': Variant('merged, blocks are selected before the window alone', settings={**merged, **before}),
        'merged-random': Variant(
            'merged, in training a quarter of the selected blocks is random', settings=merged, layers=RandomBlocks
        ),
        'merged-random-per-head': Variant(
            'the same, every query head selects blocks',
            settings={**merged, 'query_heads_share_selected_kv': False},
            layers=RandomBlocks,
        ),
        'merged-heaviest': Variant(
            'merged, the blocks of most attention mass before the window are selected, without scores',
            settings=merged,
            layers=HeaviestBlocks,
        ),
        'merged-rows': Variant(
            'merged, in training a sixteenth of the queries reads every block', settings=merged, layers=EveryBlockRows
        ),
        'merged-dense-mass': Variant(
            'merged, block scores trained by use_diff_topk and by `block_score_loss`', settings=merged, block_loss=0.1
        ),
        'merged-dense-mass-1': Variant('the same, the loss weighs 1', settings=merged, block_loss=1.0),
        'merged-dense-mass-detached': Variant(
            'the same, queries and keys learn from selected attention alone',
            settings=merged,
            layers=DetachedScores,
            block_loss=1.0,
        ),
        'merged-dense-mass-rows': Variant(
            'merged-dense-mass and merged-rows together', settings=merged, layers=EveryBlockRows, block_loss=0.1
        ),
        'merged-dense-mass-far': Variant(
            'merged-dense-mass, blocks are selected before the window alone',
            settings={**merged, **before},
            block_loss=0.1,
        ),
        'merged-dense-mass-far-block-mean': Variant(
            'merged-dense-mass-far, φ is the block mean, without parameters',
            settings={**merged, **before},
            phi='block-mean',
            block_loss=0.1,
        ),
        'merged-dense-mass-far-output-gate': Variant(
            'merged-dense-mass-far, a gate per head on the output',
            settings=gated,
            block_loss=0.1,
        ),
        'merged-dense-mass-far-output-gate-shut': Variant(
            'the same, gates of the compressed output start at -6',
            settings=gated,
            gate_start=SHUT,
            block_loss=0.1,
        ),
        'merged-dense-mass-far-output-gate-first16': Variant(
            'merged-dense-mass-far-output-gate, 16 queries read the blocks that the first of them selects',
            settings=gated,
            layers=FirstChoice,
            block_loss=0.1,
        ),
        'merged-dense-mass-far-output-gate-first64': Variant(
            'the same of 64 queries',
            settings=gated,
            layers=FirstChoiceOf64,
            block_loss=0.1,
        ),
        'merged-scores-dense-mass': Variant(
            'merged-scores, block scores trained by `block_score_loss` alone',
            settings={**scores, 'use_diff_topk': False},
            block_loss=0.1,
        ),
        'merged-scores-dense-mass-far': Variant(
            'merged-dense-mass-far without the compressed output', settings={**scores, **before}, block_loss=0.1
        ),
        'merged-scores-dense-mass-far-block-mean': Variant(
            'the same, φ is the block mean', settings={**scores, **before}, phi='block-mean', block_loss=0.1
        ),
        'separate-dense-mass': Variant(
            'the paper, block scores trained by use_diff_topk and by `block_score_loss`', block_loss=0.1
        ),
        'separate-rotated': Variant('the paper, with rotary embedding of compressed keys', layers=RotatedScores),
        'merged-per-head': Variant(
            'merged, every query head selects blocks', settings={**merged, 'query_heads_share_selected_kv': False}
        ),
        'merged-dense-start': Variant(
            'merged, dense attention in the first 22 % of the steps', settings=merged, dense_share=0.22
        ),
        'merged-phi-lr3': Variant('merged, learning rate of the networks φ × 3', settings=merged, phi_lr=3.0),
        'merged-phi-lr03': Variant('merged, learning rate of the networks φ × 0.3', settings=merged, phi_lr=0.3),
        'merged-scores-window-detached': Variant(
            'the same, plus a gated window', settings=scores, phi='mean', layers=DetachedScoresWithWindow
        ),
        'merged-output-gate': Variant(
            'merged, a gate per head on the output', settings={**merged, 'output_gate': True}
        ),
        'merged-local0': Variant('merged, no local blocks forced', settings={**merged, 'num_local_blocks': 0}),
        'merged-scores-local0': Variant('the same of merged-scores', settings={**scores, 'num_local_blocks': 0}),
        'merged-first-dense': Variant('merged, full attention at first', settings=merged, layer_settings={0: 'dense'}),
        'merged-gates-open': Variant('merged, compressed gates start at 2', settings=merged, gate_start=(2.0,)),
    }
    for suffix, phi, start in (('', 'mlp', 'an MLP as φ'), ('-mean', 'mean', 'φ starts as the block mean')):
        for name, settings, what in (
            ('merged', merged, 'one softmax over selected blocks and window, gated compressed output'),
            ('merged-scores', scores, 'one softmax over selected blocks and window'),
        ):
            variants[name + suffix] = Variant(f'{what}, {start}', settings=settings, phi=phi)
            variants[f'{name}-all{suffix}'] = Variant(
                f'{what}, every block selected, {start}', settings={**settings, **every}, phi=phi
            )
    for name, variant in list(variants.items()):
        about, settings = f'{variant.about}, RMSNorm of queries and keys', {**variant.settings, 'qk_norm': True}
        variants[f'{name}-qk-norm'] = replace(variant, about=about, settings=settings)
    for name, variant in list(variants.items()):
        if variant.kind == 'sparse' and 'use_diff_topk' not in variant.settings:
            settings = {**variant.settings, 'use_diff_topk': False}
            variants[f'{name}-no-diff'] = replace(
                variant, about=f'{variant.about}, use_diff_topk off', settings=settings
            )
    return variants


VARIANTS = _variants()


def sparse_settings(variant: Variant, base: Mapping[str, Any], seq_len: int, dim_head: int) -> dict[str, Any]:
    """Return the `sparse_attn_kwargs` of the variant. base: SPARSE with the flags."""
    settings = {**base, **variant.settings}
    if settings['num_selected_blocks'] == ALL:
        settings['num_selected_blocks'] = ceil(seq_len / settings['selection_block_size'])
    if settings['sliding_window_size'] == ALL:
        settings['sliding_window_size'] = seq_len
    if variant.phi == 'mean':
        expand = settings.pop('compress_mlp_expand_factor')
        settings['compress_mlp'] = MeanResidualMLP(dim_head, settings['compress_block_size'], expand)
    elif variant.phi == 'block-mean':
        del settings['compress_mlp_expand_factor']
        settings['compress_mlp'] = MeanPool()
    return settings


def build(
    name: str, shape: Mapping[str, Any], base: Mapping[str, Any], seq_len: int, seed: int, backend: str = 'auto'
) -> Transformer:
    """Build the model of a variant on the CPU. With one seed all variants start from the same shared weights.

    shape: arguments of `Transformer` that all variants have.
    """
    variant = VARIANTS[name]

    def make(**changes: Any) -> Transformer:
        settings = sparse_settings(variant, base, seq_len, shape['dim_head'])
        torch.manual_seed(seed)
        arguments = {'use_sparse_attn': variant.kind == 'sparse', 'sparse_attn_kwargs': settings, 'backend': backend}
        return Transformer(256, **{**shape, **arguments, **changes})

    if variant.wide:
        plain = make()
        wanted = count(build('separate', shape, base, seq_len, seed, backend)) - count(plain)
        dim, depth = shape['dim'], shape['depth']
        hidden = round(shape.get('ff_expansion_factor', 4.0) * dim) + round(wanted / (depth * (2 * dim + 1)))
        model = make(ff_expansion_factor=(hidden + 0.5) / dim)
        _copy_shared(model, plain)
    else:
        model = make(dense_output_gate=variant.output_gate)
    sizes = {name: shape[name] for name in ('dim', 'dim_head', 'heads', 'kv_heads')}
    for index, block in enumerate(model.blocks):
        layer, own = block.attention, variant.layer_settings.get(index)
        if own == 'dense':
            block.attention = make(use_sparse_attn=False).blocks[index].attention
        elif own is not None or variant.layers is not None:
            settings = {} if variant.kind == 'dense' else sparse_settings(variant, base, seq_len, sizes['dim_head'])
            if variant.kind == 'sparse':
                settings = {**settings, **(own or {}), 'backend': backend}
            kind = variant.layers or SparseAttention
            block.attention = kind(**sizes, causal=True, **deepcopy(settings))  # pyright: ignore[reportCallIssue]
            _copy_shared(block.attention, layer)
    for module in model.modules():
        if isinstance(module, MeanResidualMLP):
            module.to_hidden.reset_parameters()  # otherwise all layers start with copies of one network
    if variant.gate is not None:
        for block in model.blocks:
            block.attention.to_strategy_combine = variant.gate(shape['dim'], shape['heads'])
    if variant.gate_start is not None:
        set_gate_start(model, variant.gate_start)
    if variant.freeze_gates:
        for gate in _gates(model):
            gate.requires_grad_(False)
    return model


@torch.no_grad()
def _copy_shared(model: nn.Module, start: nn.Module) -> None:
    """Copy every parameter of start that model has in the same shape."""
    theirs = dict(start.named_parameters())
    for name, parameter in model.named_parameters():
        if name in theirs and theirs[name].shape == parameter.shape:
            parameter.copy_(theirs[name])


def _gates(model: nn.Module) -> Iterator[nn.Linear]:
    for name, module in model.named_modules():
        if name.endswith('to_strategy_combine') and isinstance(module, nn.Linear):
            yield module


@torch.no_grad()
def set_gate_start(model: nn.Module, start: Sequence[float]) -> None:
    """Let the gate logits of every head of every layer start with these values."""
    for gate in _gates(model):
        gate.bias.copy_(torch.tensor(start).repeat(len(gate.bias) // len(start)))


def count(model: nn.Module) -> int:
    return sum(p.numel() for p in model.parameters())


def count_sparse_only(model: Transformer) -> int:
    """Count the parameters that plain dense attention lacks: gates, networks φ, positions, memory pairs."""
    shared = ('norm.', 'to_qkv.', 'combine_heads.', 'rotary.')
    return sum(
        p.numel()
        for block in model.blocks
        for name, p in block.attention.named_parameters()
        if not name.startswith(shared)
    )


def role(name: str) -> str:
    """Return the part that a parameter belongs to: 'gate', 'phi' or 'shared'."""
    parts = name.split('.')
    return 'gate' if any(g in parts for g in GATES) else 'phi' if any(n in parts for n in NETWORKS) else 'shared'


def not_supported(name: str) -> str | None:
    """Return the reason why this version of the package cannot build the variant, or None."""
    if unknown := VARIANTS[name].settings.keys() - signature(SparseAttention).parameters.keys():
        return f'SparseAttention has no {", ".join(sorted(unknown))}'
    return None
