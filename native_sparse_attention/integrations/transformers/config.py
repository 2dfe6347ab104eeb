"""Settings of the sparse attention layers of a Hugging Face model, stored as `config.nsa`."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from typing import Any

from torch import nn

from native_sparse_attention.core import checks
from native_sparse_attention.core.backend import check_backend
from native_sparse_attention.nn import compress

# Networks φ by name, from (head size, block size, KV heads, expand factor).
NETWORKS: dict[str, Callable[[int, int, int, float], nn.Module]] = {
    'mean': lambda dim, block_size, heads, factor: compress.MeanPool(),
    'mean_residual': lambda dim, block_size, heads, factor: compress.MeanResidualMLP(dim, block_size, factor),
    'attention_pool': lambda dim, block_size, heads, factor: compress.AttentionPool(dim, block_size),
    'mlp': lambda dim, block_size, heads, factor: compress.CompressMLP(dim, block_size, factor),
    'grouped_mlp': lambda dim, block_size, heads, factor: compress.GroupedMLP(dim, block_size, heads, factor),
    'conv': lambda dim, block_size, heads, factor: compress.ConvLinearCompress(heads, dim, block_size),
    'linear': lambda dim, block_size, heads, factor: compress.SingleProjection(dim, block_size),
}

_POSITIVE = ('sliding_window_size', 'num_selected_blocks')
_NOT_NEGATIVE = ('num_init_blocks', 'num_local_blocks', 'dense_below')
_FLAGS = ('query_heads_share_selected_kv', 'select_before_window', 'use_diff_topk')
_CHOICES = {
    'init': ('dense', 'merged', 'paper'),
    'block_scores': ('rotated', 'plain'),
    'compress_mlp': tuple(NETWORKS),
}


@dataclass(frozen=True)
class NSAConfig:
    """Settings of the sparse attention layers of a model.

    Args:
        selection_block_size: l', tokens of a selection block, a multiple of the stride.
        num_selected_blocks: n, blocks that a query reads, forced ones included.
        sliding_window_size: W, keys that a query reads in its window, its own included.
        compress_block_size: l, tokens of a compressed block.
        compress_block_sliding_stride: d, tokens between starts of compressed blocks, at most l.
        num_init_blocks: forced blocks at the start.
        num_local_blocks: forced blocks that end with the query's own.
        query_heads_share_selected_kv: the heads of a group read the same blocks.
        select_before_window: only blocks with a key before the window are selected, and local blocks end with the
            newest of them. Requires init='dense' or 'merged'.
        use_diff_topk: gradients reach the block scores through the logits of the selected blocks. With init='dense',
            the network φ has no other gradient.
        init: 'dense', for pre-trained weights: one softmax over selected blocks and window, and a compressed branch
            for block scores alone. Where a query reads everything visible, the output is that of dense attention.
            'merged', for training from scratch: one softmax over selected blocks and window, plus a gated compressed
            output, and a gate on the sum. 'paper', the form of the paper: three branches with a gate each.
        dense_below: queries at positions below this one of their own sequence attend densely, without gates.
        block_scores: 'rotated': φ compresses keys with rotary embedding, and queries with it score them; 'plain': keys
            and queries without. The logits of a dense model come from rotated ones.
        compress_mlp: network φ by name: 'mean', 'mean_residual', 'attention_pool', 'mlp', 'grouped_mlp', 'conv' or
            'linear', the classes of `native_sparse_attention.compress`. 'mean_residual' starts as the block mean.
        compress_mlp_expand_factor: hidden units of φ over l * D, for networks with a hidden layer.
        layers: indices of the converted layers, ascending; None: every layer with full attention.
        backend: as in `nsa`.

    Raises:
        ValueError: a setting is out of range; names it, its value and the rule.
    """

    selection_block_size: int = 64
    num_selected_blocks: int = 16
    sliding_window_size: int = 512
    compress_block_size: int = 32
    compress_block_sliding_stride: int = 16
    num_init_blocks: int = 1
    num_local_blocks: int = 2
    query_heads_share_selected_kv: bool = True
    select_before_window: bool = False
    use_diff_topk: bool = False
    init: str = 'dense'
    dense_below: int = 0
    block_scores: str = 'rotated'
    compress_mlp: str = 'mean_residual'
    compress_mlp_expand_factor: float = 1 / 16
    layers: Sequence[int] | None = None
    backend: str = 'auto'

    def __post_init__(self) -> None:
        checks.check_positive(**{name: getattr(self, name) for name in _POSITIVE})
        checks.check_not_negative(**{name: getattr(self, name) for name in _NOT_NEGATIVE})
        checks.check_flags(**{name: getattr(self, name) for name in _FLAGS})
        sizes = (self.compress_block_size, self.compress_block_sliding_stride)
        names = ('compress_block_size', 'compress_block_sliding_stride')
        checks.check_block_sizes(*sizes, self.selection_block_size, names=names)
        for name, choices in _CHOICES.items():
            if (value := getattr(self, name)) not in choices:
                rule = ', '.join(map(repr, choices))
                raise ValueError(f'{name} is {checks.shown(value)}, but must be one of {rule}')
        if self.select_before_window and not self.merge_window:
            raise ValueError("select_before_window is True, but must be False unless init is 'dense' or 'merged'")
        if not checks.is_number(factor := self.compress_mlp_expand_factor) or not factor > 0:
            raise ValueError(f'compress_mlp_expand_factor is {checks.shown(factor)}, but must be a number above 0')
        check_backend(self.backend)
        if self.layers is not None:
            object.__setattr__(self, 'layers', checked_layers(self.layers))

    @classmethod
    def of(cls, value: NSAConfig | Mapping[str, Any] | None) -> NSAConfig:
        """Return the settings that `config.nsa` holds; the defaults for None. Raises ValueError for unknown names."""
        if value is None:
            return cls()
        if isinstance(value, cls):
            return value
        if not isinstance(value, Mapping):
            raise ValueError(f'nsa is a {type(value).__name__}, but must be an NSAConfig or a mapping of its settings')
        known = [field.name for field in fields(cls)]
        for name in value:
            if name not in known:
                raise ValueError(f'nsa has the setting {checks.shown(name)}, but must have those of NSAConfig')
        return cls(**value)

    def to_dict(self) -> dict[str, Any]:
        """Return the settings as values of JSON."""
        return asdict(self)

    def replace(self, **settings: Any) -> NSAConfig:
        """Return a copy with other settings."""
        return replace(self, **settings)

    @property
    def merge_window(self) -> bool:
        """Whether one softmax reads the selected blocks and the window."""
        return self.init != 'paper'

    @property
    def compressed_output(self) -> bool:
        """Whether the compressed branch has an output, and layers have gates; else it computes block scores alone."""
        return self.init != 'dense'

    def make_network(self, head_dim: int, kv_heads: int) -> nn.Module:
        """Return a new network φ, `[B, H, C, l, D]` to `[B, H, C, D]`."""
        make = NETWORKS[self.compress_mlp]
        return make(head_dim, self.compress_block_size, kv_heads, self.compress_mlp_expand_factor)


def checked_layers(layers: Sequence[int]) -> list[int]:
    """Return layer indices as an ascending list, or raise ValueError for repeated or negative ones and for none."""
    if isinstance(layers, str) or not isinstance(layers, Sequence) or len(layers) == 0:
        raise ValueError(
            f'layers is {checks.shown(layers)}, but must be a sequence of at least one layer index, or None'
        )
    checks.check_not_negative(**{f'layers[{i}]': index for i, index in enumerate(layers)})
    if len(set(layers)) != len(layers):
        raise ValueError(f'layers is {checks.shown(layers)}, but must name each layer once')
    return sorted(int(index) for index in layers)
