"""Random problems for kernels on a GPU, and checks of their results by the error rules.

A problem of an op is a function of (op, index) alone, so that a failure can be repeated by its name. Sizes are those
that eager in float64 answers in a fraction of a second.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from random import Random
from typing import Any

import torch
from torch import Tensor

from native_sparse_attention.losses import block_score_loss
from native_sparse_attention.ops import (
    chosen_scores,
    compressed_attention,
    gated_sum,
    select_blocks,
    selected_attention,
    window_attention,
)
from native_sparse_attention.ops.block_mass import block_mass
from native_sparse_attention.ops.rotary import norm_rotary
from native_sparse_attention.testing import (
    INDEX_KINDS,
    LAYOUTS,
    lay_out,
    make_block_indices,
    make_qkv,
    measure_errors,
    outputs_and_gradients,
)
from tests.support.problems import KINDS, Extents, cumulative, row_integers

DTYPES = (torch.bfloat16, torch.float16, torch.float32)
GROUPS = (1, 2, 3, 4, 6, 8, 12, 16, 32, 64)
HEAD_DIMS = (16, 40, 64, 80, 96, 100, 128, 192, 256)
# (l, d, l')
BLOCK_SIZES = (
    (32, 16, 64), (16, 8, 16), (8, 4, 8), (4, 4, 16), (32, 32, 64), (20, 10, 30), (7, 3, 21), (1, 1, 4), (64, 16, 64),
    (16, 16, 16), (48, 16, 32), (32, 16, 32),
)  # fmt: skip
SELECTION_BLOCK_SIZES = (16, 32, 64, 64, 8, 37, 128, 200)
MAX_SEQLEN = 700
# Problems with fewer rows are drawn several times, so that chance does not decide.
DRAWN_ROWS = 512
# The results that are float32 whatever the inputs are, and meet no rounding to a half type; of attention the
# log-sum-exp and gradients of what joins the logits. A row of them is often one number, which nothing averages, and
# tensor cores round their sums towards zero: the worst row on an H200 was 2^-13.7.
UNROUNDED = {
    'chosen_scores': ('out0', 'grad of lse'), 'block_mass': ('out0',), 'block_loss': ('out0',), 'gated_sum': (),
    'norm_rotary': (),
}  # fmt: skip
UNROUNDED_OF_ATTENTION = ('out1', 'grad of sinks', 'grad of bias')
UNROUNDED_ROW_LIMIT = 2.0**-12


@dataclass(frozen=True)
class Problem:
    """A call of an op: function(**tensors, **settings, backend=...). The floating tensors are differentiated.

    row_dims, dtypes: by name of a result, what `assert_matches` takes where it is not the default.
    """

    function: Callable[..., Any]
    tensors: dict[str, Tensor]
    settings: dict[str, Any]
    row_dims: Mapping[str, int] = field(default_factory=dict)
    dtypes: Mapping[str, torch.dtype] = field(default_factory=dict)

    def __str__(self) -> str:
        tensors = {name: f'{tuple(t.shape)} {t.stride()} {t.dtype}' for name, t in self.tensors.items()}
        return f'{self.function.__name__}({tensors}, {self.settings})'

    def run(
        self, backend: str, grads: list[Tensor] | None = None, dtype: torch.dtype | None = None
    ) -> dict[str, Tensor]:
        """Return outputs and gradients, with the floating tensors cast to `dtype`."""
        cast = {n: t.to(dtype) if dtype is not None and t.is_floating_point() else t for n, t in self.tensors.items()}
        return outputs_and_gradients(
            lambda **leaves: self.function(**leaves, **self.settings, backend=backend), cast, grads
        )

    def draw_grads(self, generator: torch.Generator) -> list[Tensor]:
        with torch.no_grad():
            outputs = self.function(**self.tensors, **self.settings, backend='eager')
        outputs = [outputs] if isinstance(outputs, Tensor) else outputs
        return [torch.randn(t.shape, dtype=t.dtype, device=t.device, generator=generator) for t in outputs]


def assert_obeys_the_rules(problem: Problem, grads: list[Tensor], backend: str = 'triton') -> dict[str, Tensor]:
    """Assert the error rules for every output and gradient. Returns the results of the backend."""
    result, same_dtype, gold = (
        problem.run(name, grads, dtype) for name, dtype in ((backend, None), ('eager', None), ('eager', torch.float64))
    )
    broken = []
    for name, tensor in result.items():
        broken += [f'{backend} {name}: {rule}' for rule in _broken_rules(problem, name, tensor, gold, same_dtype)]
    assert not broken, '\n  '.join([str(problem), *broken])
    return result


def _broken_rules(
    problem: Problem, name: str, result: Tensor, gold: Mapping[str, Tensor], same_dtype: Mapping[str, Tensor]
) -> list[str]:
    row_dims, dtype = problem.row_dims.get(name, 1), problem.dtypes.get(name)
    errors = measure_errors(result, gold[name], same_dtype[name], row_dims=row_dims, dtype=dtype)
    if result.dtype == torch.float32 and name in UNROUNDED.get(problem.function.__name__, UNROUNDED_OF_ATTENTION):
        errors = replace(errors, row_allowed=max(errors.row_allowed, UNROUNDED_ROW_LIMIT))
    return errors.broken_rules()


def draw_problem(op: str, index: int, device: torch.device) -> tuple[Problem, torch.Generator]:
    """Return problem `index` of an op, and a generator for gradients of its outputs."""
    draws = {
        'window': draw_window,
        'compressed': draw_compressed,
        'selected': draw_selected,
        'chosen_scores': draw_chosen_scores,
        'block_mass': draw_block_mass,
        'block_loss': draw_block_loss,
        'gated_sum': draw_gated_sum,
        'norm_rotary': draw_norm_rotary,
    }
    generator = torch.Generator(device).manual_seed(index)
    # The dtypes take turns, so that each has its share.
    return draws[op](Random(f'{op} {index}'), DTYPES[index % 3], device, generator), generator


@dataclass(frozen=True)
class Drawn:
    """Properties that all problems share."""

    random: Random
    dtype: torch.dtype
    device: torch.device
    generator: torch.Generator
    heads: int
    kv_heads: int
    head_dim: int
    value_dim: int
    layout: str

    @property
    def shape(self) -> dict[str, Any]:
        names = ('heads', 'kv_heads', 'head_dim', 'value_dim', 'dtype', 'device', 'layout', 'generator')
        return {name: getattr(self, name) for name in names}


def draw_shape(random: Random, dtype: torch.dtype, device: torch.device, generator: torch.Generator) -> Drawn:
    group = random.choice(GROUPS)
    kv_heads = 1 if group > 16 else random.choice((1, 2))
    head_dim = random.choice(HEAD_DIMS)
    value_dim = random.choice(HEAD_DIMS) if random.random() < 0.4 else head_dim
    layout = random.choice(LAYOUTS)
    return Drawn(random, dtype, device, generator, group * kv_heads, kv_heads, head_dim, value_dim, layout)


def draw_seqlen(random: Random, *around: int) -> int:
    """Return a length, often one off a multiple."""
    edges = [1, 63, 64, 65, 127, 128, 129, 257, *(max(1, size + by) for size in around for by in (-1, 0, 1))]
    if random.random() < 0.5:
        return min(MAX_SEQLEN, random.choice(edges))
    return random.randint(1, MAX_SEQLEN)


def draw_extents(random: Random, device: torch.device, rows_per_query: int, *around: int) -> Extents:
    """Return extents of every kind, as in tests/support/problems.py, at the sizes of a GPU."""
    kind = random.choice((*KINDS, 'whole', 'packed'))
    if kind.startswith('packed'):
        return _draw_packed(random, device, kind, *around)
    seqlen_q = draw_seqlen(random, *around)
    batch = max(random.choice((1, 2, 3)), -(-DRAWN_ROWS // (seqlen_q * rows_per_query)))
    if kind == 'whole':
        return Extents(batch, seqlen_q, seqlen_q, {}, [seqlen_q] * batch)
    seqlen_k = draw_seqlen(random, *around)
    where: dict[str, Any] = {}
    key_counts = [seqlen_k] * batch
    if kind.startswith('lengths'):
        key_counts = [random.choice((0, seqlen_k, random.randint(0, seqlen_k))) for _ in range(batch)]
        key_counts[0] = seqlen_k
        where['seqlens_k'] = row_integers(key_counts).to(device)
    if kind.endswith('row offsets'):
        where['q_offset'] = row_integers([_draw_offset(random, seqlen_k) for _ in range(batch)]).to(device)
    elif kind.endswith('offset'):
        where['q_offset'] = max(0, _draw_offset(random, seqlen_k))
    return Extents(batch, seqlen_q, seqlen_k, where, key_counts)


def _draw_packed(random: Random, device: torch.device, kind: str, *around: int) -> Extents:
    size = random.randint(1, 5)

    def lengths() -> list[int]:
        drawn = [0 if random.random() < 0.2 else draw_seqlen(random, *around) // size for _ in range(size)]
        return [*drawn[:-1], max(1, drawn[-1])]

    key_counts, uncovered = lengths(), random.choice((0, 0, 3, 70))
    if kind == 'packed':
        total = sum(key_counts) + uncovered
        extents = Extents(1, total, total, {'cu_seqlens': cumulative(key_counts).to(device)}, key_counts)
    else:
        query_counts = lengths()
        where = {'cu_seqlens': cumulative(query_counts).to(device), 'cu_seqlens_k': cumulative(key_counts).to(device)}
        extents = Extents(1, sum(query_counts) + uncovered, sum(key_counts) + 2, where, key_counts)
    if random.random() < 0.3:
        offsets = [_draw_offset(random, MAX_SEQLEN // size) for _ in range(size)]
        extents.where['q_offset'] = row_integers(offsets).to(device) if random.random() < 0.5 else max(0, offsets[0])
    return extents


def _draw_offset(random: Random, seqlen_k: int) -> int:
    return random.choice((0, -3, seqlen_k // 2, random.randint(0, seqlen_k), seqlen_k + 5))


def draw_window(random: Random, dtype: torch.dtype, device: torch.device, generator: torch.Generator) -> Problem:
    drawn = draw_shape(random, dtype, device, generator)
    extents = draw_extents(random, device, drawn.heads)
    q, k, v = make_qkv(extents.batch, extents.seqlen_q, extents.seqlen_k, **drawn.shape)
    if drawn.layout != 'expanded':
        extents.poison_keys(k, v)
    causal = random.random() < 0.7
    left, right = (random.choice((-1, 0, 1, 15, 63, 64, 100, 511, random.randint(0, MAX_SEQLEN))) for _ in range(2))
    settings = {'window_size': (left, 0 if causal else right), 'causal': causal, **_draw_scale(random), **extents.where}
    return Problem(window_attention, {'q': q, 'k': k, 'v': v}, settings, {'out1': 0})


def with_memory(mem_k: Tensor, mem_v: Tensor, **tensors_and_settings: Any) -> tuple[Tensor, Tensor]:
    """Call compressed_attention with the memory pairs as two tensors that can be differentiated by name."""
    return compressed_attention(**tensors_and_settings, mem_kv=(mem_k, mem_v))


def draw_compressed(random: Random, dtype: torch.dtype, device: torch.device, generator: torch.Generator) -> Problem:
    drawn = draw_shape(random, dtype, device, generator)
    block_size, stride, _ = random.choice(BLOCK_SIZES)
    extents = draw_extents(random, device, drawn.heads, block_size)
    q, k_cmp, v_cmp = _draw_compressed_tensors(drawn, extents, block_size, stride)
    tensors = {'q': q, 'k_cmp': k_cmp, 'v_cmp': v_cmp}
    function: Callable[..., Any] = compressed_attention
    if pairs := random.choice((0, 1, 1, 2, 17)):
        function = with_memory
        for name, dim in (('mem_k', drawn.head_dim), ('mem_v', drawn.value_dim)):
            tensors[name] = torch.randn(
                drawn.kv_heads, pairs, dim, dtype=dtype, device=device, generator=generator
            )  # fmt: skip
    settings = {
        'block_size': block_size,
        'stride': stride,
        'seqlen_k': extents.seqlen_k,
        'causal': random.random() < 0.7,
        **_draw_scale(random),
        **extents.where,
    }
    return Problem(function, tensors, settings, {'out1': 0})


def draw_selected(random: Random, dtype: torch.dtype, device: torch.device, generator: torch.Generator) -> Problem:
    drawn = draw_shape(random, dtype, device, generator)
    block_size = random.choice(SELECTION_BLOCK_SIZES)
    extents = draw_extents(random, device, drawn.heads, block_size)
    q, k, v = make_qkv(extents.batch, extents.seqlen_q, extents.seqlen_k, **drawn.shape)
    if drawn.layout != 'expanded':
        extents.poison_keys(k, v)
    causal = random.random() < 0.75
    indices = draw_indices(drawn, extents, block_size, causal)
    settings = {'block_size': block_size, 'causal': causal, **_draw_scale(random), **extents.where}
    tensors = {'q': q, 'k': k, 'v': v, 'block_indices': indices}
    if random.random() < 0.4:
        noise = torch.randn(indices.shape, device=device, generator=generator)
        tensors['block_scale'] = (1 + 0.1 * noise).to(random.choice((torch.float32, dtype)))
    # The gradients of one query's block_scale cancel each other, so a row of it is a row of the batch.
    return Problem(
        selected_attention, tensors, settings, {'out1': 0, 'grad of block_scale': 3}, {'grad of block_scale': dtype}
    )


def draw_indices(drawn: Drawn, extents: Extents, block_size: int, causal: bool) -> Tensor:
    random = drawn.random
    index_heads = drawn.heads if drawn.heads <= 16 and random.random() < 0.3 else drawn.kv_heads
    offset = extents.where.get('q_offset', 0 if 'cu_seqlens' in extents.where else extents.seqlen_k - extents.seqlen_q)
    return make_block_indices(
        random.choice((*INDEX_KINDS[:-1], 'valid', 'valid')) if random.random() < 0.97 else 'none',
        extents.batch,
        extents.seqlen_q,
        index_heads,
        random.choice((1, 2, 4, 5, 8, 8, 13, 16)),
        seqlen_k=extents.seqlen_k,
        block_size=block_size,
        q_offset=offset if isinstance(offset, int) else 0,
        causal=causal,
        device=drawn.device,
        generator=drawn.generator,
    )


def draw_selection(
    random: Random,
    dtype: torch.dtype,
    device: torch.device,
    generator: torch.Generator,
    block_sizes: tuple[tuple[int, int, int], ...] = BLOCK_SIZES,
) -> tuple[Drawn, Extents, tuple[int, int, int], dict[str, Any]]:
    """Return tensors and settings that the two ops of block scores share."""
    drawn = draw_shape(random, dtype, device, generator)
    sizes = random.choice(block_sizes)
    extents = draw_extents(random, device, drawn.heads, sizes[0], sizes[2])
    settings = {
        'compress_block_size': sizes[0],
        'compress_stride': sizes[1],
        'selection_block_size': sizes[2],
        'seqlen_k': extents.seqlen_k,
        'causal': random.random() < 0.75,
        **_draw_scale(random),
        **extents.where,
    }
    return drawn, extents, sizes, settings


def draw_chosen_scores(random: Random, dtype: torch.dtype, device: torch.device, generator: torch.Generator) -> Problem:
    drawn, extents, (block_size, stride, selection_block_size), settings = draw_selection(
        random, dtype, device, generator
    )  # fmt: skip
    q, k_cmp, v_cmp = _draw_compressed_tensors(drawn, extents, block_size, stride)
    lse = attention_lse(q, k_cmp, v_cmp, settings)
    indices = draw_indices(drawn, extents, selection_block_size, settings['causal'])
    tensors = {'q': q, 'k_cmp': k_cmp, 'lse': lse, 'block_indices': indices}
    # A query's scores make a row.
    return Problem(chosen_scores, tensors, settings, {'grad of lse': 0})


def draw_block_mass(random: Random, dtype: torch.dtype, device: torch.device, generator: torch.Generator) -> Problem:
    drawn = draw_shape(random, dtype, device, generator)
    block_size = random.choice(SELECTION_BLOCK_SIZES)
    extents = draw_extents(random, device, drawn.heads, block_size)
    q, k, _ = make_qkv(extents.batch, extents.seqlen_q, extents.seqlen_k, **drawn.shape)
    if drawn.layout != 'expanded':
        extents.poison_keys(k)
    causal = random.random() < 0.7
    left, right = (random.choice((-1, 0, 1, 64, 511, random.randint(0, MAX_SEQLEN))) for _ in range(2))
    settings: dict[str, Any] = {'block_size': block_size, 'causal': causal, 'share_group': random.random() < 0.7}
    if random.random() < 0.8:
        settings['window_size'] = (left, 0 if causal else right)
    if random.random() < 0.3:
        settings['softcap'] = random.choice((2.0, 30.0))
    return Problem(block_mass, {'q': q, 'k': k}, {**settings, **_draw_scale(random), **extents.where})


def draw_block_loss(random: Random, dtype: torch.dtype, device: torch.device, generator: torch.Generator) -> Problem:
    drawn, extents, (block_size, stride, _), settings = draw_selection(random, dtype, device, generator)
    q_cmp, k_cmp, _ = _draw_compressed_tensors(drawn, extents, block_size, stride)
    q, k, _ = make_qkv(extents.batch, extents.seqlen_q, extents.seqlen_k, **drawn.shape)
    del settings['seqlen_k']
    settings |= {'target': (q, k), 'share_group': random.random() < 0.7, 'seed': random.randrange(2**32)}
    settings['num_queries'] = random.choice((5, 64, 1000))
    if random.random() < 0.8:
        left, right = (random.choice((-1, 0, 1, 64, random.randint(0, MAX_SEQLEN))) for _ in range(2))
        settings['window_size'] = (left, 0 if settings['causal'] else right)
    if random.random() < 0.3:
        settings['softcap'] = random.choice((2.0, 30.0))
    return Problem(block_loss, {'q_cmp': q_cmp, 'k_cmp': k_cmp}, settings, {'out0': 0})


def block_loss(q_cmp: Tensor, k_cmp: Tensor, *, target: tuple[Tensor, Tensor], **settings: Any) -> Tensor:
    """Return 256 times the loss of the block scores: float16 has few digits for gradients of a mean over rows.

    target: queries and keys of the mass.
    """
    q, k = (t.to(q_cmp.dtype) for t in target)
    return 256 * block_score_loss(q, k, q_cmp, k_cmp, **settings)


def draw_select_blocks(
    index: int, device: torch.device, exact: bool
) -> tuple[dict[str, Tensor], dict[str, Any], dict[str, Any]]:
    """Return tensors, settings of the scores, settings of the selection alone.

    exact: weights are 1 or 0 and the log-sum-exp is 0, so that scores are counts without rounding and many are equal.
    """
    random, generator = Random(f'select_blocks {index} {exact}'), torch.Generator(device).manual_seed(index)
    # Thirds of a token cannot be counted without rounding.
    block_sizes = tuple(sizes for sizes in BLOCK_SIZES if not exact or sizes[1] != 3)
    dtype = DTYPES[index % 3]
    drawn, extents, (block_size, stride, _), settings = draw_selection(random, dtype, device, generator, block_sizes)
    q, k_cmp, v_cmp = _draw_compressed_tensors(drawn, extents, block_size, stride)
    if exact:
        settings['scale'] = 1.0
        feature = torch.randint(0, drawn.head_dim, q.shape[:3], device=device, generator=generator)
        q = torch.nn.functional.one_hot(feature, drawn.head_dim).to(drawn.dtype)
        kept = torch.rand(k_cmp.shape, device=device, generator=generator) < 0.4
        k_cmp = (-2048.0 * ~kept).to(drawn.dtype)
        lse = torch.zeros(q.shape[0], drawn.heads, q.shape[1], device=device)
    else:
        lse = attention_lse(q, k_cmp, v_cmp, settings)
    selection = {
        'num_selected': random.choice((0, 1, 2, 4, 5, 8, 16, 16, 33)),
        'num_init': random.choice((0, 1, 1, 2)),
        'num_local': random.choice((0, 1, 2, 2, 3)),
        'share_group': drawn.heads > 16 or random.random() < 0.7,
        'num_recent': random.choice((0, 1, 100, 600)) if settings['causal'] else 0,
    }
    return {'q': q, 'k_cmp': k_cmp, 'lse': lse}, settings, selection


def choose(backend: str, tensors: dict[str, Tensor], settings: dict[str, Any], selection: dict[str, Any]) -> Tensor:
    return select_blocks(**tensors, **settings, **selection, backend=backend)


def draw_gated_sum(random: Random, dtype: torch.dtype, device: torch.device, generator: torch.Generator) -> Problem:
    drawn = draw_shape(random, dtype, device, generator)
    seqlen = draw_seqlen(random)
    batch = max(random.choice((1, 2, 3)), -(-DRAWN_ROWS // (seqlen * drawn.heads)))
    shape = (batch, seqlen, drawn.heads, drawn.value_dim)
    gates = torch.rand(*shape[:3], 3, device=device, generator=generator).to(random.choice((torch.float32, dtype)))
    if random.random() < 0.3:
        gates = gates.permute(3, 0, 1, 2).contiguous().permute(1, 2, 3, 0)
    tensors = {'gates': gates}
    for name in ('out_compressed', 'out_selected', 'out_window'):
        branch = torch.randn(shape, dtype=dtype, device=device, generator=generator)
        tensors[name] = lay_out(branch, random.choice(LAYOUTS))
    return Problem(gated_sum, tensors, {}, {}, {'grad of gates': dtype})


def draw_norm_rotary(random: Random, dtype: torch.dtype, device: torch.device, generator: torch.Generator) -> Problem:
    drawn = draw_shape(random, dtype, device, generator)
    seqlen = draw_seqlen(random)
    batch = max(random.choice((1, 2, 3)), -(-DRAWN_ROWS // (seqlen * drawn.heads)))
    x = torch.randn(batch, seqlen, drawn.heads, drawn.head_dim, dtype=dtype, device=device, generator=generator)
    weight = (torch.rand(drawn.head_dim, device=device, generator=generator) + 0.5).to(dtype)
    tensors = {'x': lay_out(x, drawn.layout), 'weight': weight.to(random.choice((torch.float32, dtype)))}
    num_angles = random.choice((drawn.head_dim // 2, drawn.head_dim // 4))
    rows = random.choice((1, batch))
    angles = 1000 * torch.rand(rows, seqlen, num_angles, device=device, generator=generator)
    num_plain, num_rotated = random.choice(((1, 1), (1, 2), (0, 1), (0, 2), (1, 0)))
    settings = {
        'num_plain': num_plain,
        'num_rotated': num_rotated,
        'tables': (angles.cos(), angles.sin()),
        'eps': 1e-6,
        'layout': random.choice(('interleaved', 'half')),
    }
    return Problem(norm_rotary, tensors, settings, {}, {'grad of weight': dtype})


def attention_lse(q: Tensor, k_cmp: Tensor, v_cmp: Tensor, settings: dict[str, Any]) -> Tensor:
    """Return the log-sum-exp `[B, HQ, T]` that the ops of block scores take."""
    settings = dict(settings)
    sizes = {'block_size': settings.pop('compress_block_size'), 'stride': settings.pop('compress_stride')}
    del settings['selection_block_size']
    with torch.no_grad():
        return compressed_attention(q, k_cmp, v_cmp, **sizes, **settings, backend='eager')[1]


def _draw_compressed_tensors(drawn: Drawn, extents: Extents, block_size: int, stride: int) -> tuple[Tensor, ...]:
    num_compressed = extents.num_compressed(block_size, stride) + drawn.random.choice((0, 0, 1, 5))
    q, _, _ = make_qkv(extents.batch, extents.seqlen_q, 1, **drawn.shape)
    _, k_cmp, v_cmp = make_qkv(extents.batch, 1, num_compressed, **drawn.shape)
    if drawn.layout != 'expanded':
        extents.poison_blocks(block_size, stride, k_cmp, v_cmp)
    return q, k_cmp, v_cmp


def _draw_scale(random: Random) -> dict[str, float]:
    return {'scale': random.choice((0.05, 0.3))} if random.random() < 0.15 else {}


def make_nsa(
    batch: int,
    seqlen: int,
    *,
    heads: int = 8,
    kv_heads: int = 2,
    head_dim: int = 64,
    sizes: tuple[int, int, int, int, int] = (32, 16, 64, 8, 128),
    dtype: torch.dtype = torch.bfloat16,
    device: torch.device | str = 'cuda',
    seed: int = 0,
) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Return tensors and settings of `nsa`; sizes: l, d, l', n, W."""
    generator = torch.Generator(device).manual_seed(seed)
    shape = {'heads': heads, 'kv_heads': kv_heads, 'head_dim': head_dim, 'dtype': dtype, 'device': device}
    block_size, stride, selection_block_size, num_selected, window = sizes
    num_compressed = max(0, (seqlen - block_size) // stride + 1)
    q, k, v = make_qkv(batch, seqlen, seqlen, **shape, generator=generator)
    _, k_cmp, v_cmp = make_qkv(batch, 1, num_compressed, **shape, generator=generator)
    gates = torch.rand(batch, seqlen, heads, 3, device=device, generator=generator)
    settings = {
        'compress_block_size': block_size,
        'compress_stride': stride,
        'selection_block_size': selection_block_size,
        'num_selected': num_selected,
        'window_size': (window - 1, 0),
    }
    return {'q': q, 'k': k, 'v': v, 'k_cmp': k_cmp, 'v_cmp': v_cmp, 'gates': gates}, settings
