"""The dense twin: equal to the definition, padded or packed = alone, and its cache."""

from __future__ import annotations

import warnings

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from native_sparse_attention.nn.dense import DenseAttention


def assert_near(actual: Tensor, expected: Tensor, tolerance: float = 1e-9) -> None:
    torch.testing.assert_close(actual, expected, rtol=tolerance, atol=tolerance)


def by_hand(attn: DenseAttention, x: Tensor) -> Tensor:
    """Compute attention of one sequence `[T, dim]`, head by head and query by query."""
    length = len(x)
    x = x / (x.square().mean(-1, keepdim=True) + torch.finfo(x.dtype).eps).sqrt() * attn.get_parameter('norm.weight')
    projected = x @ attn.to_qkv.weight.T
    q, k, v = projected.split(attn.projection_sizes, dim=-1)
    q, k, v = q.view(length, attn.heads, -1), k.view(length, attn.kv_heads, -1), v.view(length, attn.kv_heads, -1)
    if attn.q_norm is not None and attn.k_norm is not None:
        q, k = (t / (t.square().mean(-1, keepdim=True) + 1e-6).sqrt() for t in (q, k))
        q, k = q * attn.q_norm.weight, k * attn.k_norm.weight
    angles = torch.arange(length).float()[:, None] * (
        10000 ** -(torch.arange(0, attn.dim_head, 2).float() / attn.dim_head)
    )
    q, k = rotate(q, angles), rotate(k, angles)
    out = torch.zeros(length, attn.heads, attn.dim_value_head, dtype=x.dtype)
    for head in range(attn.heads):
        kv_head = head // (attn.heads // attn.kv_heads)
        for t in range(length):
            last = t + 1 if attn.causal else length
            weights = (k[:last, kv_head] @ q[t, head] * attn.dim_head**-0.5).softmax(0)
            out[t, head] = weights @ v[:last, kv_head]
    return out.flatten(1) @ attn.combine_heads.weight.T


def rotate(x: Tensor, angles: Tensor) -> Tensor:
    """Rotate neighbouring pairs of x `[T, H, D]` by angles `[T, D / 2]`, as complex numbers."""
    pairs = torch.view_as_complex(x.unflatten(-1, (-1, 2)).contiguous())
    rotated = pairs * torch.polar(torch.ones_like(angles), angles).to(pairs.dtype)[:, None]
    return torch.view_as_real(rotated).flatten(-2)


@pytest.mark.parametrize('causal', [True, False])
@pytest.mark.parametrize(('kv_heads', 'value_dim', 'qk_norm'), [(6, 8, False), (2, 8, True), (1, 12, False)])
def test_equals_the_definition(causal, kv_heads, value_dim, qk_norm):
    torch.manual_seed(0)
    attn = DenseAttention(16, 8, 6, kv_heads, causal, dim_value_head=value_dim, qk_norm=qk_norm).double()
    for name, parameter in attn.named_parameters():
        if 'norm' in name:
            parameter.data += torch.rand(len(parameter))
    x = torch.randn(2, 11, 16, dtype=torch.float64)
    assert_near(attn(x), torch.stack([by_hand(attn, row) for row in x]), 1e-6)


def test_norms_of_queries_and_keys_are_fused_under_autocast():
    """PyTorch warns where it has no fused kernel."""
    attn = DenseAttention(16, 8, 4, 2, qk_norm=True)
    assert attn.q_norm is not None
    with warnings.catch_warnings(), torch.autocast('cpu', torch.bfloat16):
        warnings.simplefilter('error')
        attn(torch.randn(2, 5, 16)).float().sum().backward()
    assert attn.q_norm.weight.grad is not None
    assert attn.q_norm(torch.ones(1, 1, 4, 8).bfloat16()).dtype == torch.bfloat16


def test_output_gate_scales_each_head():
    torch.manual_seed(0)
    plain = DenseAttention(16, 8, 4, 2).double()
    gated = DenseAttention(16, 8, 4, 2, output_gate=True).double()
    assert gated.output_gate is not None
    assert not plain.load_state_dict(gated.state_dict(), strict=False).missing_keys
    x = torch.randn(2, 7, 16, dtype=torch.float64)
    assert_near(gated(x), plain(x) * torch.tensor(2.0, dtype=torch.float64).sigmoid())
    torch.nn.init.normal_(gated.output_gate.weight)
    heads = []
    plain.combine_heads.register_forward_pre_hook(lambda module, inputs: heads.append(inputs[0]))
    plain(x)
    gates = gated.output_gate(gated.norm(x)).sigmoid()
    expected = (heads[0].unflatten(-1, (4, 8)) * gates[..., None]).flatten(-2) @ gated.combine_heads.weight.T
    assert_near(gated(x), expected)


def test_output_gate_of_cached_padded_and_packed_tokens():
    attn = DenseAttention(16, 8, 4, 2, output_gate=True).double().eval()
    assert attn.output_gate is not None
    torch.nn.init.normal_(attn.output_gate.weight)
    x = torch.randn(1, 9, 16, dtype=torch.float64)
    expected = attn(x)
    out, cache = attn(x[:, :4], return_cache=True)
    assert_near(torch.cat([out, *(attn(part, cache=cache) for part in x[:, 4:].split(2, 1))], 1), expected)
    padded = torch.cat([x.new_full((1, 2, 16), torch.nan), x], 1)
    mask = torch.arange(11)[None] >= 2
    assert_near(attn(padded, mask)[:, 2:], expected)
    packed = attn(torch.cat([x, x], 1), cu_seqlens=torch.tensor([0, 9, 18], dtype=torch.int32))
    assert_near(packed, torch.cat([expected, expected], 1))


def test_takes_part_of_the_settings():
    attn = DenseAttention(16, 8, 2, norm=False, rotary_emb=False).double()
    x = torch.randn(1, 7, 16, dtype=torch.float64)
    q, k, v = (t.view(1, 7, 2, 8).transpose(1, 2) for t in (x @ attn.to_qkv.weight.T).split(16, dim=-1))
    expected = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2)
    assert_near(attn(x), expected @ attn.combine_heads.weight.T)


@pytest.mark.parametrize('causal', [True, False])
@pytest.mark.parametrize('side', ['left', 'right'])
def test_rows_with_padding_equal_rows_alone(causal, side):
    attn = DenseAttention(16, 8, 4, 2, causal).double()
    lengths = [5, 0, 9]
    x = torch.full((3, 9, 16), torch.nan, dtype=torch.float64)
    mask = torch.zeros(3, 9, dtype=torch.bool)
    for row, length in enumerate(lengths):
        real = slice(9 - length, None) if side == 'left' else slice(length)
        x[row, real], mask[row, real] = torch.randn(length, 16, dtype=torch.float64), True
    x.requires_grad_()
    out = attn(x, mask)
    out.square().sum().backward()
    for row in range(3):
        if lengths[row]:
            assert_near(out[row][mask[row]], attn(x[row][mask[row]][None])[0])
    assert torch.equal(out[~mask], torch.zeros_like(out[~mask]))
    assert x.grad is not None
    assert x.grad[mask].isfinite().all()
    assert torch.equal(x.grad[~mask], torch.zeros_like(x.grad[~mask]))
    assert all(p.grad is not None and p.grad.isfinite().all() for p in attn.parameters() if p.requires_grad)


@pytest.mark.parametrize('causal', [True, False])
def test_packed_sequences_equal_sequences_alone(causal):
    attn = DenseAttention(16, 8, 4, 2, causal).double()
    x = torch.randn(1, 12, 16, dtype=torch.float64)
    x[:, 10:] = torch.nan
    out = attn(x, cu_seqlens=torch.tensor([0, 3, 3, 4, 10], dtype=torch.int32))
    alone = [attn(x[:, start:end]) for start, end in [(0, 3), (3, 4), (4, 10)]]
    assert_near(out[:, :10], torch.cat(alone, dim=1))
    assert torch.equal(out[:, 10:], torch.zeros_like(out[:, 10:]))


def test_cache_reads_nothing_but_what_was_written():
    attn = DenseAttention(16, 8, 4, 2).double().eval()
    x = torch.randn(2, 6, 16, dtype=torch.float64)
    mask = torch.tensor([[True] * 6, [True] * 2 + [False] * 4])
    cache = attn.init_cache(2, 20)
    cache.k.fill_(torch.nan)
    cache.v.fill_(torch.nan)
    out = attn(x, mask, cache=cache)
    assert_near(out[0], attn(x[:1])[0])
    assert_near(out[1, :2], attn(x[1:, :2])[0])
    one = attn(x[:, :1], cache=cache)
    assert_near(one[1], attn(torch.cat((x[1:, :2], x[1:, :1]), dim=1))[0, -1:])


@pytest.mark.parametrize(
    ('sizes', 'message'),
    [
        ({'heads': 4, 'kv_heads': 3}, 'heads is 4'),
        ({'dim_head': 0}, 'dim_head is 0'),
        ({'kv_heads': 0}, 'kv_heads is 0'),
        ({'dim_head': 2}, 'dim_head is 2, but a default rotary embedding'),
        ({'causal': 'no'}, "causal is 'no', but must be True or False"),
        ({'norm': None}, 'norm is None, but must be True or False'),
        ({'qk_norm': 1}, 'qk_norm is 1, but must be True or False'),
        ({'output_gate': 1}, 'output_gate is 1, but must be True or False'),
    ],
)
def test_refuses_sizes(sizes, message):
    with pytest.raises(ValueError, match=message):
        DenseAttention(16, **sizes)


def test_refuses_calls():
    attn = DenseAttention(16, 8, 2).eval()
    x, cu_seqlens = torch.randn(2, 4, 16), torch.tensor([0, 4], dtype=torch.int32)
    with pytest.raises(ValueError, match='x has batch size 2'):
        attn(x, cu_seqlens=cu_seqlens)
    with pytest.raises(ValueError, match='mask and cu_seqlens'):
        attn(x[:1], torch.ones(1, 4, dtype=torch.bool), cu_seqlens)
    with pytest.raises(ValueError, match='cu_seqlens is given, but a cache'):
        attn(x[:1], cu_seqlens=cu_seqlens, return_cache=True)
    with pytest.raises(ValueError, match='x is a list, but must be a tensor'):
        attn([[[0.0] * 16]])
    with pytest.raises(ValueError, match='mask is a list, but must be a bool tensor'):
        attn(x, [[True] * 4] * 2)
    with pytest.raises(ValueError, match="return_cache is 'no', but must be True or False"):
        attn(x, return_cache='no')
    bidirectional = DenseAttention(16, 8, 2, causal=False).eval()
    with pytest.raises(ValueError, match='causal is False'):
        bidirectional(x, return_cache=True)
    with pytest.raises(ValueError, match='causal is False'):
        bidirectional.init_cache(2, 8)
    with pytest.raises(ValueError, match='cache is a list, but must be a LayerCache'):
        attn(x, cache=[attn.init_cache(2, 8)])
