"""Code written for native-sparse-attention-pytorch 0.2.3 works after the import is changed."""

from __future__ import annotations

import inspect
import itertools
import random
import warnings
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
from native_sparse_attention.inference.model_cache import ModelCache
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

# Two blocks are what is forced here, and 0.2.3 chose two more.
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
        'use_triton_kernel': None,  # False in 0.2.3, which stands for eager here
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


def test_arguments_of_the_transformer_by_position():
    kwargs = dict(zip(list(README)[3:], (4, 4, 2, 4, 5), strict=True))
    model = Transformer(16, 32, 2, 8, 4, 2, 2.0, True, True, False, False, False, kwargs)
    assert model.get_parameter('layers.1.feed_forward.1.weight').shape == (64, 32)
    attn = sparse_attentions(model)[1]
    assert (attn.kv_heads, attn.sliding_window_size, attn.num_selected_blocks) == (2, 4, 5)


@pytest.mark.parametrize(
    ('flags', 'backend'),
    [
        ({'use_flex_sliding_window': True}, 'flex'),
        ({'use_flex_fine_selection': True}, 'flex'),
        ({'use_triton_fine_selection': True}, 'auto'),
        ({'use_triton_fine_selection': True, 'use_flex_sliding_window': True}, 'auto'),
    ],
)
def test_flags_become_a_backend(flags, backend):
    with pytest.warns(DeprecationWarning, match=f'{next(iter(flags))}.*backend={backend!r}') as caught:
        model = Transformer(16, 32, 2, 8, 4, use_sparse_attn=True, **flags)
    assert caught[0].filename == __file__
    assert len(caught) == 1
    assert [attn.backend for attn in sparse_attentions(model)] == [backend] * 2


def test_flags_that_are_off_say_nothing():
    with warnings.catch_warnings():
        warnings.simplefilter('error')
        Transformer(16, 32, 1, 8, 4, use_sparse_attn=True, use_flex_sliding_window=False)


def test_flags_that_contradict():
    with pytest.raises(ValueError, match='use_flex_fine_selection and use_triton_fine_selection'):
        trainer_model(use_flex_fine_selection=True, use_triton_fine_selection=True)
    with pytest.raises(ValueError, match="backend is 'eager', but use_flex_sliding_window asks for 'flex'"):
        trainer_model(use_flex_sliding_window=True, backend='eager')


def test_flags_of_a_call_of_the_model():
    model, ids = Transformer(16, 32, 2, 8, 4, use_sparse_attn=True).eval(), torch.randint(16, (1, 20))
    for flag in ('disable_flex', 'disable_triton_kernel'):
        with pytest.warns(DeprecationWarning, match=f"{flag} is deprecated: use backend='eager'") as caught:
            logits, cache = model(ids, return_cache=True, **{flag: True})
        assert caught[0].filename == __file__
        assert (len(caught), len(cache)) == (1, 2)
        torch.testing.assert_close(logits, model(ids))
    with pytest.raises(ValueError, match="disable_flex is 'no', but must be True or False"):
        model(ids, disable_flex='no')


@pytest.mark.parametrize(
    ('backend', 'flag', 'taken'),
    [
        ('auto', 'disable_flex', 'eager'),
        ('auto', 'disable_triton_kernel', 'eager'),
        ('flex', 'disable_flex', 'eager'),
        ('flex', 'disable_triton_kernel', 'flex'),
        ('triton', 'disable_flex', 'triton'),
        ('triton', 'disable_triton_kernel', 'eager'),
    ],
)
@pytest.mark.filterwarnings('ignore:disable_:DeprecationWarning')
def test_the_backend_that_a_call_takes(backend, flag, taken, monkeypatch):
    model, seen = Transformer(16, 32, 2, 8, 4, use_sparse_attn=True, backend=backend), []
    attend = native_sparse_attention.SparseAttention._attend_whole
    monkeypatch.setattr(
        native_sparse_attention.SparseAttention,
        '_attend_whole',
        lambda self, x, order, cu_seqlens, backend, loss: (
            seen.append(backend) or attend(self, x, order, cu_seqlens, 'eager', loss)
        ),
    )
    model(torch.randint(16, (1, 20)), **{flag: True})
    assert seen == [taken] * 2


def test_flags_of_a_layer():
    settings: dict[str, Any] = README | {'dim': 32, 'dim_head': 8, 'heads': 4, 'num_selected_blocks': 6}
    for flag, backend in ((True, 'auto'), (False, 'eager')):
        with pytest.warns(DeprecationWarning, match=f'use_triton_kernel.*backend={backend!r}') as caught:
            layer = SparseAttention(**settings, use_triton_kernel=flag)
        assert caught[0].filename == __file__
        assert (len(caught), layer.backend) == (1, backend)
    x = torch.randn(1, 9, 32)
    layer = SparseAttention(**settings)
    with pytest.warns(DeprecationWarning, match='disable_triton_kernel') as caught:
        attended = layer(x, disable_triton_kernel=True)
    assert caught[0].filename == __file__
    assert torch.equal(attended, layer(x))
    for name in ('sliding_window_flex_mask', 'fine_selection_flex_mask'):
        with pytest.raises(ValueError, match=f"^{name} is given, but must be None: backend='flex' makes its own"):
            layer(x, **{name: object()})
    with pytest.raises(ValueError, match="use_triton_kernel is 'no', but must be True or False"):
        SparseAttention(**settings, use_triton_kernel='no')  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="use_triton_kernel and backend='flex' are given"):
        SparseAttention(**settings, use_triton_kernel=True, backend='flex')


def test_what_goes_beyond_is_taken_by_name():
    settings: dict[str, Any] = README | {'dim': 32, 'dim_head': 8, 'heads': 4}
    layer, x = SparseAttention(**settings, softcap=5.0), torch.randn(1, 9, 32)
    assert layer.softcap == 5.0
    mask = torch.arange(9)[None] < 7
    torch.testing.assert_close(layer(x, mask=mask)[:, :7], layer(x[:, :7]))
    model = Transformer(16, 32, 1, 8, 4, tie_embeddings=True)
    assert model.is_tied
    assert model(torch.randint(16, (1, 9)), last_only=True).shape == (1, 16)


def test_a_cache_with_all_ids():
    """The loop of 0.2.3 passes all ids so far; a new id alone does as well."""
    model, ids = Transformer(16, 32, 2, 8, 4, use_sparse_attn=True).eval(), torch.randint(16, (2, 12))
    expected = model(ids)
    for first in (0, 5):
        logits, cache = model(ids[:, :5], return_cache=True)
        steps = [logits]
        for length in range(6, 13):
            logits, cache = model(ids[:, first and length - 1 : length], cache=cache, return_cache=True)
            steps.append(logits)
        torch.testing.assert_close(torch.cat(steps, dim=1), expected)
    mask = torch.ones_like(ids, dtype=torch.bool)
    mask[0, :3] = False
    logits, cache = model(ids[:, :5], mask=mask[:, :5], return_cache=True)
    masked, cache = model(ids, mask=mask, cache=cache, return_cache=True)
    torch.testing.assert_close(masked[1], expected[1, 5:])
    torch.testing.assert_close(masked[0], model(ids[:1, 3:])[0, 2:])
    with pytest.raises(ValueError, match='ids has 5 tokens per row, but must have 1 or more than the 12 in the cache'):
        model(ids[:, :5], cache=cache, return_cache=True)
    wrong: Any = cache[0]
    with pytest.raises(ValueError, match='cache is a LayerCache, but must be a ModelCache'):
        model(ids, cache=wrong, return_cache=True)
    assert isinstance(cache, ModelCache)
