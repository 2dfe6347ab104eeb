"""Code written for native-sparse-attention-pytorch 0.2.3 works after the import is changed."""

from __future__ import annotations

import inspect
import itertools
import random
from typing import Any

import pytest
import torch
from einops.layers.torch import Rearrange
from torch import nn

import native_sparse_attention
from native_sparse_attention.compress import (
    AttentionPool,
    CompressTransformer,
    ConvLinearCompress,
    GroupedMLP,
    SingleProjection,
)
from native_sparse_attention.integrations.lucidrains import SparseAttention, Transformer
from native_sparse_attention.nn import transformer

README: dict[str, Any] = {
    'dim': 512,
    'dim_head': 64,
    'heads': 8,
    'sliding_window_size': 2,
    'compress_block_size': 4,
    'compress_block_sliding_stride': 2,
    'selection_block_size': 4,
    'num_selected_blocks': 2,
}

# Two blocks are forced here, and 0.2.3 selected two more.
pytestmark = pytest.mark.filterwarnings('ignore:.*num_selected_blocks:UserWarning')


# Parameters of 0.2.3 in their order, and their defaults. None where a tensor or a module is left out.
SIGNATURES: dict[Any, dict[str, Any]] = {
    SparseAttention: dict.fromkeys(README, inspect.Parameter.empty)
    | {
        'kv_heads': None,
        'num_compressed_mem_kv': 1,
        'causal': False,
        'norm': True,
        'use_diff_topk': False,
        'use_triton_kernel': None,  # False in 0.2.3, which means eager here
        'query_heads_share_selected_kv': True,
        'compress_mlp': None,
        'compress_mlp_expand_factor': 1.0,
        'strategy_combine_mlp': None,
    },
    SparseAttention.forward: {
        'self': inspect.Parameter.empty,
        'inp': inspect.Parameter.empty,
        'cache': None,
        'disable_triton_kernel': False,
        'sliding_window_flex_mask': None,
        'fine_selection_flex_mask': None,
        'return_cache': False,
    },
    Transformer: {
        **dict.fromkeys(('num_tokens', 'dim', 'depth'), inspect.Parameter.empty),
        'dim_head': 64,
        'heads': 8,
        'kv_heads': None,
        'ff_expansion_factor': 4.0,
        'use_sparse_attn': False,
        'causal': True,
        'use_flex_sliding_window': False,
        'use_flex_fine_selection': False,
        'use_triton_fine_selection': False,
        'sparse_attn_kwargs': transformer.DEFAULT_SPARSE_ATTN_KWARGS,
    },
    Transformer.forward: {
        'self': inspect.Parameter.empty,
        'ids': inspect.Parameter.empty,
        'return_loss': False,
        'disable_flex': False,
        'disable_triton_kernel': False,
        'cache': None,
        'return_cache': False,
    },
    Transformer.sample: {
        **dict.fromkeys(('self', 'prompt', 'seq_len'), inspect.Parameter.empty),
        'temperature': 1.0,
        'filter_thres': 0.9,
        'use_cache_kv': False,
    },
}


@pytest.mark.parametrize('function', SIGNATURES, ids=lambda function: function.__qualname__)
def test_signatures(function):
    parameters = inspect.signature(function).parameters.values()
    placed = [(p.name, p.default) for p in parameters if p.kind is p.POSITIONAL_OR_KEYWORD]
    assert placed == list(SIGNATURES[function].items())


def core_layer(**changes: Any) -> native_sparse_attention.SparseAttention:
    return native_sparse_attention.SparseAttention(32, 8, 4, 3, 4, 2, 6, 4, causal=True, **changes)


def core_model(**changes: Any) -> transformer.Transformer:
    return transformer.Transformer(16, 32, 1, 8, 4, use_sparse_attn=True, **changes)


@pytest.mark.parametrize(
    ('call', 'flags'),
    [
        (core_layer, ['use_triton_kernel']),
        (
            lambda **flags: core_layer()(torch.randn(1, 9, 32), **flags),
            ['disable_triton_kernel', 'sliding_window_flex_mask', 'fine_selection_flex_mask'],
        ),
        (core_model, ['use_flex_sliding_window', 'use_flex_fine_selection', 'use_triton_fine_selection']),
        (
            lambda **flags: core_model()(torch.randint(16, (1, 9)), **flags),
            ['disable_flex', 'disable_triton_kernel'],
        ),
    ],
    ids=['SparseAttention', 'SparseAttention', 'Transformer', 'Transformer'],
)
def test_the_core_classes_name_the_wrapper(call, flags, request):
    wrapper = f'native_sparse_attention.integrations.lucidrains.{request.node.callspec.id.rstrip("01")}'
    for flag in flags:
        with pytest.raises(ValueError, match=f'^{flag} is True, but must be left out: .*{wrapper} takes') as error:
            call(**{flag: True})
        assert '\n' not in str(error.value)
    with pytest.raises(TypeError, match="unexpected keyword argument 'use_triton'"):
        call(use_triton=True)


def test_layer_of_the_readme():
    attn = SparseAttention(**README)
    assert not attn.causal
    tokens = torch.randn(2, 31, 512)
    assert attn(tokens).shape == tokens.shape


def test_arguments_by_position():
    torch.manual_seed(0)
    named = SparseAttention(
        dim=32,
        dim_head=8,
        heads=4,
        sliding_window_size=3,
        compress_block_size=4,
        compress_block_sliding_stride=2,
        selection_block_size=6,
        num_selected_blocks=4,
        kv_heads=2,
        num_compressed_mem_kv=3,
        causal=True,
        norm=False,
        use_diff_topk=True,
    )
    torch.manual_seed(0)
    placed = SparseAttention(32, 8, 4, 3, 4, 2, 6, 4, 2, 3, True, False, True)
    tokens = torch.randn(2, 31, 32)
    assert torch.equal(named(tokens), placed(tokens))
    torch.manual_seed(0)
    defaults = SparseAttention(32, 8, 4, 3, 4, 2, 6, 4)
    torch.manual_seed(0)
    spelled = SparseAttention(32, 8, 4, 3, 4, 2, 6, 4, None, 1, False, True, False, None, True, None, 1.0, None)
    assert torch.equal(defaults(tokens), spelled(tokens))


SETTINGS = list(
    itertools.product(
        (False, True),  # use_diff_topk
        (False, True),  # causal
        (1, 4, 31, 32, 120),  # tokens
        (8, 4),  # kv_heads
        (8, 16, 32),  # selection_block_size
        (8, 4),  # compress_block_size
        (2, 4),  # compress_block_sliding_stride
        (0, 2),  # num_selected_blocks
        (False, True),  # query_heads_share_selected_kv
    )
)


@pytest.mark.parametrize('setting', random.Random(0).sample(SETTINGS, 24), ids=str)
def test_every_setting_keeps_the_shape(setting):
    diff, causal, seq_len, kv_heads, selection_size, compress_size, stride, selected, shared = setting
    attn = SparseAttention(
        dim=64,
        dim_head=16,
        heads=8,
        kv_heads=kv_heads,
        causal=causal,
        sliding_window_size=2,
        selection_block_size=selection_size,
        compress_block_size=compress_size,
        compress_block_sliding_stride=stride,
        num_selected_blocks=selected,
        use_diff_topk=diff,
        query_heads_share_selected_kv=shared,
    )
    tokens = torch.randn(2, seq_len, 64)
    attended = attn(tokens)
    assert attended.shape == tokens.shape
    assert attended.isfinite().all()


@pytest.mark.parametrize('seq_len', [2, 8, 16])
@pytest.mark.parametrize('num_selected_blocks', [0, 2])
@pytest.mark.parametrize('stride', [2, 4])
@pytest.mark.parametrize('selection_block_size', [8, 16, 20])
def test_steps_equal_the_parallel_forward(seq_len, num_selected_blocks, stride, selection_block_size):
    attn = SparseAttention(
        dim=512,
        dim_head=64,
        heads=8,
        causal=True,
        sliding_window_size=2,
        compress_block_size=5,
        selection_block_size=selection_block_size,
        num_selected_blocks=num_selected_blocks,
        compress_block_sliding_stride=stride,
    ).eval()
    tokens = torch.randn(2, seq_len, 512)
    parallel = attn(tokens)
    cache, steps = None, []
    for token in tokens.split(1, dim=1):
        step, cache = attn(token, cache=cache, return_cache=True)
        steps.append(step)
    torch.testing.assert_close(torch.cat(steps, dim=1), parallel, rtol=0, atol=1e-5)


@pytest.mark.full
@pytest.mark.parametrize('selection_block_size', [4, 8])
def test_transformer_samples_alike_with_and_without_the_cache(selection_block_size):
    torch.manual_seed(0)
    model = Transformer(
        num_tokens=256,
        dim=512,
        depth=2,
        causal=True,
        use_sparse_attn=True,
        sparse_attn_kwargs={
            'sliding_window_size': 16,
            'compress_block_size': 4,
            'compress_block_sliding_stride': 2,
            'selection_block_size': selection_block_size,
            'num_selected_blocks': 2,
        },
    )
    prompt = torch.randint(0, 256, (1, 1))
    recomputed = model.sample(prompt, 64, temperature=0.0, use_cache_kv=False)
    assert recomputed.shape == (1, 63)
    assert torch.equal(model.sample(prompt, 64, temperature=0.0, use_cache_kv=True), recomputed)


def compress_networks() -> list[nn.Module]:
    mlp = nn.Sequential(
        Rearrange('b h w n d -> b h w (n d)'),
        nn.Linear(256, 256),
        nn.SiLU(),
        nn.Linear(256, 64),
    )
    return [
        mlp,
        AttentionPool(64, 4),
        GroupedMLP(64, 4, 8),
        GroupedMLP(dim_head=64, compress_window_size=4, heads=8, expand_factor=0.5),
        SingleProjection(64, 4, 1),
        SingleProjection(64, 4, 8),
        ConvLinearCompress(8, 64, 4),
    ]


@pytest.mark.parametrize('network', compress_networks(), ids=lambda network: type(network).__name__)
def test_compress_network(network):
    attn = SparseAttention(**README, compress_mlp=network)
    tokens = torch.randn(2, 31, 512)
    attended = attn(tokens)
    assert attended.shape == tokens.shape
    attended.sum().backward()
    theirs = [*attn.k_compress.parameters(), *attn.v_compress.parameters()]
    assert len(theirs) == 2 * len(list(network.parameters()))
    assert all(p.grad is not None for p in theirs)


def test_compress_transformer():
    attn = SparseAttention(
        dim=512,
        dim_head=64,
        heads=8,
        sliding_window_size=64,
        compress_block_size=16,
        compress_block_sliding_stride=2,
        selection_block_size=16,
        num_selected_blocks=2,
        kv_heads=2,
        compress_mlp=CompressTransformer(num_layers=2, dim=128, num_heads=2),
    )
    tokens = torch.randn(2, 31, 512)
    assert attn(tokens).shape == tokens.shape


def trainer_model(**flags: Any) -> Transformer:
    """The model of the trainer of 0.2.3, narrower."""
    torch.manual_seed(0)
    return Transformer(
        num_tokens=256,
        dim=64,
        depth=2,
        heads=8,
        dim_head=16,
        kv_heads=4,
        use_sparse_attn=True,
        sparse_attn_kwargs={
            'sliding_window_size': 64,
            'compress_block_size': 16,
            'compress_block_sliding_stride': 8,
            'compress_mlp': GroupedMLP(dim_head=16, compress_window_size=16, heads=4),
            'selection_block_size': 16,
            'num_selected_blocks': 4,
            'use_diff_topk': True,
            'query_heads_share_selected_kv': True,
        },
        **flags,
    )


def sparse_attentions(model: Transformer) -> list[native_sparse_attention.SparseAttention]:
    attentions = [block.attention for block in model.blocks]
    return [attn for attn in attentions if isinstance(attn, native_sparse_attention.SparseAttention)]


def test_trainer():
    with pytest.warns(DeprecationWarning, match="backend='auto'"):
        model = trainer_model(
            use_flex_sliding_window=True, use_triton_fine_selection=True, use_flex_fine_selection=False
        )
    data = torch.randint(0, 256, (2, 97))
    optim = torch.optim.Adam(model.parameters(), lr=1e-3)
    losses = []
    for _ in range(4):
        loss = model(data, return_loss=True)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optim.step()
        optim.zero_grad()
        losses.append(loss.item())
    assert losses[-1] < losses[0]
    model.eval()
    assert model.sample(data[:1, :64], 80, use_cache_kv=True).shape == (1, 16)
    assert not model.training


def test_layers_share_no_compress_network():
    networks = [m for attn in sparse_attentions(trainer_model()) for m in (attn.k_compress, attn.v_compress)]
    parameters = [p.data_ptr() for network in networks for p in network.parameters()]
    assert len(networks) == 4
    assert len(set(parameters)) == len(parameters)


def test_default_sparse_attn_kwargs():
    model = Transformer(16, 32, 1, 8, 4, use_sparse_attn=True)
    ids = torch.randint(16, (2, 50))
    assert model(ids).shape == (2, 50, 16)
    (attn,) = sparse_attentions(model)
    assert (attn.sliding_window_size, attn.compress_block_size, attn.compress_block_sliding_stride) == (32, 4, 4)
    assert (attn.selection_block_size, attn.num_selected_blocks) == (4, 4)
