"""The loss of block scores, as the layer and the model return it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from native_sparse_attention import SparseAttention
from native_sparse_attention.losses import block_score_loss
from native_sparse_attention.nn.compress import MeanResidualMLP
from native_sparse_attention.nn.transformer import Transformer

pytestmark = pytest.mark.filterwarnings('ignore:compressed_output is False and use_diff_topk is False')
SIZES: dict[str, Any] = {
    'sliding_window_size': 4,
    'compress_block_size': 4,
    'compress_block_sliding_stride': 2,
    'selection_block_size': 4,
    'num_selected_blocks': 5,
    'kv_heads': 1,
    'causal': True,
}
FORMS: dict[str, dict[str, Any]] = {
    'separate': {},
    'merged': {'merge_window': True},
    'scores alone': {'merge_window': True, 'compressed_output': False},
}


def make_layer(form: str = 'scores alone', **changes: Any) -> SparseAttention:
    torch.manual_seed(0)
    return SparseAttention(16, 8, 2, **{**SIZES, **FORMS[form], **changes}).double()


def run(layer: SparseAttention, x: Tensor, **where: Any) -> tuple[Tensor, Tensor]:
    torch.manual_seed(1)  # of the queries that are drawn
    return layer(x, return_block_loss=True, **where)


@pytest.mark.parametrize('form', FORMS)
def test_output_is_that_of_a_call_without_loss(form: str) -> None:
    layer, x = make_layer(form), torch.randn(2, 40, 16, dtype=torch.float64)
    out, loss = run(layer, x)
    torch.testing.assert_close(out, layer(x), rtol=1e-12, atol=1e-12)
    assert loss.shape == ()
    assert loss > 0


@pytest.mark.parametrize('form', FORMS)
def test_loss_of_the_tensors_that_the_layer_selects_by(form: str, monkeypatch: pytest.MonkeyPatch) -> None:
    layer, x = make_layer(form), torch.randn(2, 40, 16, dtype=torch.float64)
    calls = []

    def record(*tensors: Tensor, **settings: Any) -> Tensor:
        calls.append((tensors, settings))
        return block_score_loss(*tensors, **settings)

    monkeypatch.setattr('native_sparse_attention.nn.attention.block_score_loss', record)
    _, loss = run(layer, x)
    (((q, k, q_cmp, k_cmp), settings),) = calls
    assert not torch.equal(q, q_cmp)
    torch.testing.assert_close(q.norm(dim=-1), q_cmp.norm(dim=-1))  # rotated and not
    assert (k.shape, k_cmp.shape) == ((2, 40, 1, 8), (2, 19, 1, 8))
    expected = {
        'compress_block_size': 4,
        'compress_stride': 2,
        'selection_block_size': 4,
        'window_size': (3, 0),
        'share_group': True,
    }
    assert expected.items() <= settings.items()
    torch.manual_seed(1)
    assert block_score_loss(*calls[0][0], **settings) == loss


def test_gradients_reach_scores_alone() -> None:
    layer = make_layer('merged', use_diff_topk=False)
    _, loss = run(layer, torch.randn(1, 40, 16, dtype=torch.float64))
    loss.backward()
    trained = {name for name, p in layer.named_parameters() if p.grad is not None and p.grad.abs().max() > 0}
    assert {'to_qkv.weight', 'k_intrablock_positions'} < trained
    assert any(name.startswith('k_compress') for name in trained)
    assert not any(name.startswith(('v_compress', 'to_strategy', 'combine_heads')) for name in trained)
    values = layer.to_qkv.weight.grad
    assert values is not None
    assert (values[-8:] == 0).all()


@pytest.mark.parametrize('seqlen', [0, 1, 3, 40])
@pytest.mark.parametrize('form', FORMS)
def test_every_parameter_has_a_gradient(form: str, seqlen: int) -> None:
    """Distributed training waits for a gradient of every parameter, also of memory that the loss does not read and
    without blocks.
    """
    layer = make_layer(form)
    out, loss = run(layer, torch.randn(1, seqlen, 16, dtype=torch.float64))
    (out.sum() + loss).backward()
    assert not [name for name, p in layer.named_parameters() if p.grad is None]


def test_training_lowers_the_loss() -> None:
    network = MeanResidualMLP(8, 4, 1.0)
    layer, x = make_layer(compress_mlp=network), torch.randn(4, 64, 16, dtype=torch.float64)
    with torch.no_grad():
        layer.to_qkv.weight *= 4  # so that attention prefers some blocks
    assert layer.k_compress is not None
    optimizer = torch.optim.Adam(layer.k_compress.parameters(), 1e-2)
    losses = []
    for _ in range(30):
        _, loss = run(layer, x)
        losses.append(loss.item())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    assert losses[-1] < 0.9 * losses[0]


def test_padding_does_not_count() -> None:
    layer, x = make_layer(), torch.randn(1, 30, 16, dtype=torch.float64)
    _, alone = run(layer, x)
    for left in (0, 7):
        padded = torch.cat((torch.randn(1, left, 16), x, torch.randn(1, 7 - left, 16)), 1).double()
        mask = torch.zeros(1, 37, dtype=torch.bool)
        mask[:, left : left + 30] = True
        torch.testing.assert_close(run(layer, padded, mask=mask)[1], alone, rtol=1e-12, atol=1e-12)
    _, packed = run(layer, torch.cat((x, x[:, :5]), 1), cu_seqlens=torch.tensor([0, 30], dtype=torch.int32))
    torch.testing.assert_close(packed, alone, rtol=1e-12, atol=1e-12)


def test_model_returns_the_mean_of_its_sparse_layers() -> None:
    sparse = {**SIZES, **FORMS['merged']}
    for name in ('kv_heads', 'causal'):
        del sparse[name]
    torch.manual_seed(0)
    model = Transformer(32, 16, 2, heads=2, dim_head=8, kv_heads=1, use_sparse_attn=True, sparse_attn_kwargs=sparse)
    ids = torch.randint(32, (2, 41))
    loss, block_loss = model(ids, return_loss=True, return_block_loss=True)
    torch.testing.assert_close(loss, model(ids, return_loss=True))
    (loss + 0.1 * block_loss).backward()
    logits, again = model(ids, return_block_loss=True)
    torch.testing.assert_close(logits, model(ids))
    assert block_loss > 0
    assert again > 0
    (gradient, *_) = (p.grad for name, p in model.named_parameters() if name.endswith('k_intrablock_positions'))
    assert gradient is not None
    assert gradient.abs().max() > 0


def test_refusals() -> None:
    x = torch.randn(1, 8, 16, dtype=torch.float64)
    for layer, options, message in (
        (make_layer(), {'return_cache': True}, 'return_block_loss is True with a cache'),
        (make_layer(recompute=True), {}, 'needs recompute=False'),
        (make_layer('merged', num_selected_blocks=0), {}, 'num_selected_blocks is 0'),
        (make_layer(), {'return_block_loss': 1}, 'return_block_loss is 1'),
    ):
        with torch.no_grad(), pytest.raises(ValueError, match=message):
            layer(x, **{'return_block_loss': True, **options})
    dense = Transformer(32, 16, 1, heads=2, dim_head=8, kv_heads=1, use_sparse_attn=False)
    ids = torch.randint(32, (1, 8))
    with pytest.raises(ValueError, match='the model has no sparse attention'):
        dense(ids, return_block_loss=True)
    with torch.no_grad(), pytest.raises(ValueError, match='return_block_loss is True with a cache'):
        dense(ids, return_block_loss=True, return_cache=True)
