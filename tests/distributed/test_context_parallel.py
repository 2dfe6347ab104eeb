"""`apply_cp` and `context_parallel_nsa`: a sequence divided over ranks has the results of one process.

PyTorch's own `context_parallel` is refused: sparse attention would read the shard of its rank alone.
"""

from __future__ import annotations

import copy
import random
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from native_sparse_attention import functional, nsa
from native_sparse_attention.compress import CompressMLP, MeanPool
from native_sparse_attention.nn.compress.apply import compress_tokens
from native_sparse_attention.transformer import Transformer
from tests.support.processes import run_processes
from tests.support.sharded_models import (
    assert_near,
    gradients,
    learned_rotary,
    make_ids,
    make_model,
    recorded_blocks,
    whole,
)

pytest.importorskip('torch.distributed.fsdp', exc_type=ImportError)
from torch.distributed import init_device_mesh

from native_sparse_attention.distributed import apply_cp, apply_fsdp, context_parallel_nsa
from native_sparse_attention.distributed.sequence import balanced

full = pytest.mark.full


def line() -> Any:
    return init_device_mesh('cpu', (dist.get_world_size(),))


def cut(total: int, draw: random.Random | None = None, ranks: int | None = None) -> list[range]:
    """Return contiguous shards of all ranks, of nearly equal lengths, or of random lengths with empty shards among
    them.
    """
    ranks = dist.get_world_size() if ranks is None else ranks
    inner = [total * rank // ranks for rank in range(1, ranks)]
    if draw is not None:
        inner = sorted(draw.randint(0, total) for _ in inner)
    return [range(a, b) for a, b in pairwise([0, *inner, total])]


def test_balanced_causal_work() -> None:
    for ranks in (1, 2, 3, 4, 7):
        held = balanced(tuple((shard,) for shard in cut(6 * ranks, ranks=ranks)))
        assert sorted(token for parts in held for part in parts for token in part) == list(range(6 * ranks))
        assert len({sum(sum(part) for part in parts) for parts in held}) == 1


def assert_same_blocks(found: list[Tensor], expected: list[Tensor], shards: list[range], rank: int) -> None:
    """found: `[B, T, 1 or G, n]` of each layer, KV head and range of tokens. expected: `[B, T, H or HQ, n]` of each
    layer.
    """
    last = expected[0].shape[1] if expected else 0
    held = balanced(tuple((range(min(s.start, last), min(s.stop, last)),) for s in shards))[rank]
    calls = iter(found)
    for blocks in expected:
        heads = found[0].shape[2]
        for head in range(0, blocks.shape[2], heads):
            for part in held or (range(0),):
                mine = next(calls)[:, : len(part)]
                wanted = blocks[:, part.start : part.stop, head : head + heads]
                assert torch.equal(mine, wanted), 'another block is selected'
    assert next(calls, None) is None


def assert_equal_training(
    model: Transformer,
    one: Transformer,
    ids: Tensor,
    shards: list[range],
    **options: Any,
) -> None:
    """model: divided. one: the same model in one process. shards: of the sequence."""
    rank = dist.get_rank()
    mine = (slice(None), slice(shards[rank].start, shards[rank].stop))

    def loss_of(m: Transformer, *at: Any) -> Any:
        if 'num_items_in_batch' in options:
            return m(ids[at], labels=ids[at], **options).loss
        return m(ids[at], return_loss=True, **options)

    with recorded_blocks() as expected_blocks:
        expected = loss_of(one)
        expected.backward()
    with recorded_blocks() as blocks:
        loss = loss_of(model, *mine)
    loss.backward()  # of a checkpoint, which selects again, outside of the record
    if one.training and one._checkpointing is not None:
        expected_blocks = expected_blocks[: len(one.blocks)]
    assert_same_blocks(blocks, expected_blocks, shards, rank)
    assert_near(loss, expected, 'loss')
    of_ranks: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(of_ranks, loss.item())
    assert len(set(of_ranks)) == 1, 'ranks differ in the loss'
    largest = max(p.grad.abs().max() for p in one.parameters() if p.grad is not None)
    for name, wanted in gradients(one).items():
        found = whole(model.get_parameter(name).grad)
        dist.all_reduce(found)
        found = found / dist.get_world_size()
        # A softmax over one key has a gradient of 0 up to rounding.
        limit = wanted.new_tensor([largest * 1e-3])
        assert_near(torch.cat([found.flatten(), limit]), torch.cat([wanted.flatten(), limit]), name)
    options.pop('num_items_in_batch', None)
    stop = ids.shape[1] if options.get('cu_seqlens') is None else int(options['cu_seqlens'][-1])
    logits, wanted = model(ids[mine], **options), one(ids, **options)[mine]
    assert logits.shape == wanted.shape
    if stop > mine[1].start and wanted.numel():  # logits of tokens of no sequence are undefined
        assert_near(logits[:, : stop - mine[1].start], wanted[:, : stop - mine[1].start], 'logits')
    model.zero_grad()
    one.zero_grad()


def train(kind: str) -> None:
    one, ids = make_model(kind), make_ids(2)
    model = apply_cp(copy.deepcopy(one), line())
    assert_equal_training(model, one, ids, cut(33))
    if dist.get_rank() == 0:  # a call with a cache is not divided
        prompt = ids[:, :9]
        assert torch.equal(model.eval().generate(prompt, 4, seed=0), one.eval().generate(prompt, 4, seed=0))


def test_equals_one_process(tmp_path: Path) -> None:
    run_processes(train, 2, tmp_path, 'separate')


def draw_packing(draw: random.Random, total: int) -> Tensor:
    borders = sorted(draw.randint(0, total) for _ in range(draw.choice([1, 2, 5])))
    return torch.tensor([0, *borders], dtype=draw.choice([torch.int32, torch.int64]))


def draw_model(seed: int) -> tuple[Transformer, Tensor, dict[str, Any]]:
    """Return a model, ids and options of its call."""
    random_ = random.Random(seed)
    draw = random_.choice
    sparse: dict[str, Any] = {'merge_window': draw([True, False]), 'num_selected_blocks': draw([0, 1, 3, 5])}
    sparse |= {name: draw([True, False]) for name in ('norm', 'qk_norm', 'recompute', 'use_diff_topk')}
    sparse |= {'query_heads_share_selected_kv': draw([True, False]), 'softcap': draw([None, 5.0])}
    sparse['num_compressed_mem_kv'], sparse['num_sinks'] = draw([(1, 0), (0, 1), (3, 2)])
    sparse['rotary_emb'] = draw([None, False, learned_rotary()])
    sparse['compressed_output'] = not sparse['merge_window'] or draw([True, False])
    sparse['independent_branch_kv'] = not sparse['merge_window'] and draw([True, False])
    if sparse['compressed_output']:
        sparse['dim_value_head'] = draw([6, 8])
    l, d, selected = draw([(4, 2, 4), (3, 2, 4), (4, 4, 8), (6, 2, 2), (5, 1, 3), (1, 1, 1)])
    sparse |= {'compress_block_size': l, 'compress_block_sliding_stride': d, 'selection_block_size': selected}
    sparse |= {
        'sliding_window_size': draw([1, 4, 20]),
        'num_init_blocks': draw([0, 1]),
        'num_local_blocks': draw([0, 2]),
    }
    kv_heads, seqlen = draw([1, 2, 3]), draw([2, 5, 17, 33, 40])
    sizes = {'kv_heads': kv_heads, 'heads': kv_heads * draw([1, 2]), 'causal': draw([True, True, False])}
    sparse['select_before_window'] = sparse['merge_window'] and sizes['causal'] and draw([True, False])
    settings = {'depth': draw([1, 2]), 'tie_embeddings': draw([True, False])}
    sparse['output_gate'] = sparse['merge_window'] and sparse['compressed_output'] and draw([True, False])
    model = make_model(sparse=sparse, seed=seed, **settings, **sizes)
    if draw([True, False]):
        model.gradient_checkpointing_enable()
    options: dict[str, Any] = draw([{}, {}, {'num_items_in_batch': 7}])
    batch = draw([1, 2])
    if batch == 1 and draw([True, True, False]):
        options = {**options, 'cu_seqlens': draw_packing(random_, seqlen)}
    return model, make_ids(batch, seqlen, seed), options


def train_drawn_settings(seeds: range) -> None:
    for seed in seeds:
        model, ids, options = draw_model(seed)
        model = model.to(torch.float32 if seed % 4 == 3 else torch.float64)
        shards = cut(ids.shape[1], random.Random(seed) if seed % 3 else None)
        try:
            assert_equal_training(apply_cp(copy.deepcopy(model), line()), model, ids, shards, **options)
        except Exception as error:
            raise AssertionError(f'seed {seed}, shards {shards}') from error


@full
@pytest.mark.parametrize(('ranks', 'count'), [(1, 4), (2, 10), (3, 12), (4, 8)])
def test_drawn_settings(ranks: int, count: int, tmp_path: Path) -> None:
    run_processes(train_drawn_settings, ranks, tmp_path, range(100 * ranks, 100 * ranks + count))


def draw_call(draw: Any, seqlen: int, batch: int) -> tuple[dict[str, Any], dict[str, Any], dict[str, Any]]:
    """Return tensors of tokens, replicated tensors, and settings of `nsa`; value heads have 6 features of 8."""
    kv_heads, group_size = draw([1, 2]), draw([1, 3])
    heads, scores_only = kv_heads * group_size, draw([True, False, False])
    merged = scores_only or draw([True, False])

    def token(*sizes: int) -> Tensor:
        return torch.randn(batch, seqlen, *sizes, dtype=torch.float64).requires_grad_()

    tokens: dict[str, Any] = {'q': token(heads, 8), 'k': token(kv_heads, 8), 'v': token(kv_heads, 6)}
    tokens['gates'] = None if scores_only else token(heads, draw([1, 2]) if merged else 3)
    if not merged and draw([True, False]):
        tokens['gates'] = [token(heads), None, token(heads)]
    if draw([True, False]):
        tokens |= {'q_cmp': token(heads, 8), 'k_cmp_input': token(kv_heads, 8)}
    if not merged and draw([True, False]):
        tokens |= {'q_window': token(heads, 8), 'k_window': token(kv_heads, 8), 'v_window': token(kv_heads, 6)}
    memory = [torch.randn(kv_heads, 2, size, dtype=torch.float64).requires_grad_() for size in (8, 6)]
    shared: dict[str, Any] = {'mem_kv': (memory[0], None if scores_only else memory[1])}
    shared['sinks'] = torch.randn(heads, 1, dtype=torch.float64).requires_grad_()
    settings: dict[str, Any] = {'merge_window': merged, 'compress_block_size': 4, 'compress_stride': 2}
    settings |= {'selection_block_size': 4, 'num_selected': draw([2, 4]), 'window_size': (draw([0, 3]), 0)}
    settings |= {'share_group': draw([True, False]), 'use_diff_topk': draw([True, False]), 'backend': 'eager'}
    settings['num_recent'] = draw([0, 4])
    return tokens, shared, settings


def leaves(*values: Any) -> list[Tensor]:
    """Return the tensors among values, and in lists, tuples and dicts of them."""
    if len(values) != 1:
        return [leaf for value in values for leaf in leaves(value)]
    (value,) = values
    if isinstance(value, dict | tuple | list):
        return leaves(*(value.values() if isinstance(value, dict) else value))
    return [] if value is None else [value]


def shard_of(tensors: Any, shard: range) -> Any:
    if isinstance(tensors, list):
        return [shard_of(t, shard) for t in tensors]
    return None if tensors is None else tensors[:, shard.start : shard.stop]


def call_drawn_functions() -> None:
    """Gradients of tokens are those of one process; those of replicated weights are parts of them."""
    for seed in range(16):
        random_ = random.Random(seed)
        draw = random_.choice
        torch.manual_seed(seed)
        seqlen, batch = draw([1, 3, 18, 30]), draw([1, 2])
        tokens, shared, settings = draw_call(draw, seqlen, batch)
        cu_seqlens = draw_packing(random_, seqlen) if batch == 1 and draw([True, False]) else None
        networks = [CompressMLP(size, 4).double() for size in (8, 6)] if draw([True, False]) else [mean_of_block] * 2
        weights = [p for network in networks if isinstance(network, nn.Module) for p in network.parameters()]
        given, no_positions = dict(tokens), [torch.zeros(tokens['k'].shape[2], 4, size).double() for size in (8, 6)]
        inputs = (given.pop('k_cmp_input', tokens['k']), tokens['v'])
        modules = [network if isinstance(network, nn.Module) else MeanPool() for network in networks]
        k_cmp, v_cmp = (
            compress_tokens(modules[i], inputs[i], no_positions[i], 2, cu_seqlens, name='', value_dim=(8, 6)[i])
            for i in range(2)
        )
        if tokens['gates'] is None:
            networks[1] = v_cmp = None  # type: ignore[call-overload]
        expected = nsa(**given, k_cmp=k_cmp, v_cmp=v_cmp, cu_seqlens=cu_seqlens, **shared, **settings)
        out_grad = torch.randn_like(expected)
        inputs = [*leaves(tokens), *leaves(shared), *weights]
        wanted = torch.autograd.grad(expected, inputs, out_grad, allow_unused=True, retain_graph=True)

        shard = cut(seqlen, random_ if seed % 3 else None)[dist.get_rank()]
        mine = {name: shard_of(t, shard) for name, t in tokens.items()}
        of_group: dict[str, Any] = {'compress_k': networks[0], 'compress_v': networks[1], 'group': dist.group.WORLD}
        out = context_parallel_nsa(**mine, **of_group, cu_seqlens=cu_seqlens, **shared, **settings)
        assert out.shape == expected[:, shard.start : shard.stop].shape
        found = torch.autograd.grad(out, inputs, shard_of(out_grad, shard), allow_unused=True)
        whole_out = torch.zeros_like(expected)
        whole_out[:, shard.start : shard.stop] = out.detach()
        dist.all_reduce(whole_out)
        assert_near(whole_out, expected, f'seed {seed}')
        for i, (gradient, of_one) in enumerate(zip(found, wanted, strict=True)):
            # The gradient of a token is 0 on ranks that do not have it.
            if of_one is not None:
                total = torch.zeros_like(of_one) if gradient is None else gradient.contiguous()
                dist.all_reduce(total)
                assert_near(total, of_one, f'seed {seed}, gradient {i}')


def train_function_alone() -> None:
    """A function may have weights of its own and be all that is trained; the last rank has no block."""
    tokens, _, settings = draw_call(lambda values: values[-1], 6, 1)
    tokens = {name: t.detach() for name, t in tokens.items()}
    weight = torch.tensor(0.7, dtype=torch.float64, requires_grad=True)

    def network(blocks: Tensor) -> Tensor:
        return nn.functional.normalize(blocks, dim=-1).mean(-2) * weight

    k_cmp, v_cmp = (nn.functional.normalize(tokens[n].unfold(1, 4, 2), dim=-2).mean(-1) * weight for n in 'kv')
    expected = nsa(**tokens, k_cmp=k_cmp, v_cmp=v_cmp, **settings)
    (wanted,) = torch.autograd.grad(expected.square().sum(), weight)
    shard = range(2 * dist.get_rank(), 2 * dist.get_rank() + 2)
    mine = {name: shard_of(t, shard) for name, t in tokens.items()}
    networks: dict[str, Any] = {'compress_k': network, 'compress_v': network, 'group': dist.group.WORLD}
    context_parallel_nsa(**mine, **networks, **settings).square().sum().backward()
    found = weight.grad
    assert found is not None
    dist.all_reduce(found)
    assert_near(found, wanted, 'gradient of the function')


def call_under_autocast() -> None:
    """Half types under autocast to the other half type; all ranks, two ranks, or one rank hold tokens."""
    for seqlen, dtype in ((18, torch.float16), (2, torch.bfloat16), (1, torch.float16)):
        shard = cut(seqlen)[dist.get_rank()]
        sizes = {'q': (2, 8), 'k': (1, 8), 'v': (1, 6), 'gates': (2, 3)}
        whole = {name: torch.randn(1, seqlen, *size) for name, size in sizes.items()}
        tokens = {name: shard_of(t, shard).to(dtype).requires_grad_() for name, t in whole.items()}
        settings: dict[str, Any] = {'compress_block_size': 4, 'compress_stride': 2, 'selection_block_size': 4}
        settings |= {'num_selected': 2, 'window_size': (3, 0), 'backend': 'eager', 'group': dist.group.WORLD}
        settings |= {'compress_k': mean_of_block, 'compress_v': mean_of_block}
        expected = context_parallel_nsa(**tokens, **settings)
        with torch.autocast('cpu', torch.bfloat16 if dtype == torch.float16 else torch.float16):
            found = context_parallel_nsa(**tokens, **settings)
        assert torch.equal(found, expected)
        gradients = (torch.autograd.grad(t.float().square().sum(), list(tokens.values())) for t in (found, expected))
        assert all(map(torch.equal, *gradients))


def call_functions() -> None:
    train_function_alone()
    call_under_autocast()
    call_drawn_functions()


def mean_of_block(blocks: Tensor) -> Tensor:
    return blocks.mean(-2)


@full
def test_function(tmp_path: Path) -> None:
    run_processes(call_functions, 3, tmp_path)


def run_compiled() -> None:
    """In a compiled model or module, the exchanges of tokens run uncompiled."""
    one, ids, rank = make_model(depth=1), make_ids(1), dist.get_rank()
    model: Any = torch.compile(apply_cp(copy.deepcopy(one), line()), backend='eager')
    for shard in (cut(33)[rank], [range(33), range(33, 33)][rank]):
        assert_near(model(ids[:, shard.start : shard.stop], return_loss=True), one(ids, return_loss=True))
    tokens, shared, settings = draw_call(lambda values: values[-1], 4, 1)
    settings |= {'compress_k': mean_of_block, 'compress_v': mean_of_block, 'group': dist.group.WORLD}
    call = partial(context_parallel_nsa, **tokens, **shared, **settings)
    assert torch.equal(torch.compile(lambda: call() * 2, backend='eager')(), call() * 2)


@full
def test_compiled(tmp_path: Path) -> None:
    run_processes(run_compiled, 2, tmp_path)


def raise_on_all_ranks() -> None:
    """An error of one rank is raised on all in one line, before tokens are exchanged; the group works afterwards."""
    rank, group = dist.get_rank(), dist.group.WORLD
    model, ids = apply_cp(make_model(), line()), make_ids(1, 4)
    mask = torch.ones_like(ids, dtype=torch.bool)
    packed = [torch.tensor([0, 5, 12]), torch.tensor([0, 6, 12])]
    calls: list[tuple[str, Any]] = [
        ('mask is given, but must not be', lambda odd: model(ids, mask=mask if odd else None)),
        ('last_only is given', lambda odd: model(ids, last_only=odd)),
        ('return_cache is given', lambda odd: model(ids, return_cache=odd)),
        ('return_block_loss is given', lambda odd: model(ids, return_loss=True, return_block_loss=odd)),
        ('ids has shape .* and dtype torch.float32', lambda odd: model(ids.float() if odd else ids)),
        ('labels has shape', lambda odd: model(ids, labels=ids[:, 1:] if odd else ids)),
        ('the batch size of ids is 1 on rank 0, but 2 on rank 1', lambda odd: model(make_ids(2, 4) if odd else ids)),
        ('labels is None on rank 0, but a Tensor on rank 1', lambda odd: model(ids, labels=ids if odd else None)),
        ('num_items_in_batch is 3', lambda odd: model(ids, labels=ids, num_items_in_batch=torch.tensor(3 + odd))),
        ('return_loss is False on rank 0, but True on rank 1', lambda odd: model(ids, return_loss=odd)),
        ('cu_seqlens is None on rank 0', lambda odd: model(ids, cu_seqlens=packed[0] if odd else None)),
        (r'cu_seqlens is \[0, 5, 12\] on rank 0', lambda odd: model(ids, cu_seqlens=packed[odd])),
        ('cu_seqlens ends at 12, but there are 9 tokens', lambda odd: model(ids[:, :3], cu_seqlens=packed[0])),
        ('the shards of a sequence have 0 tokens together', lambda odd: model(ids[:, :0])),
        ('ids has 1 tokens per row', lambda odd: model(ids[:, : int(odd)], return_loss=True)),
        ('training is True on rank 0, but False on rank 1', lambda odd: model.train(not odd)(ids)),
    ]
    tokens, shared, settings = draw_call(lambda values: values[-1], 4, 1)
    settings |= {'compress_k': mean_of_block, 'compress_v': mean_of_block, 'group': group}

    def call(**changes: Any) -> Tensor:
        return context_parallel_nsa(**{**tokens, **shared, **settings, **changes})

    def call_short(**changes: Any) -> Tensor:
        return call(**{name: shard_of(t, range(2)) for name, t in tokens.items()}, **changes)

    wrong = torch.zeros(1, 4, 5, 7, dtype=torch.float64)
    calls += [
        ('gates', lambda odd: call(gates=wrong if odd else tokens['gates'])),
        ('k has', lambda odd: call(k=wrong if odd else tokens['k'])),
        ('q is a NoneType, but must be a tensor', lambda odd: call(q=None if odd else tokens['q'])),
        ('v has shape .* must start with', lambda odd: call(v=tokens['v'][:, :3] if odd else tokens['v'])),
        ('num_selected is 2 on rank 0, but 3 on rank 1', lambda odd: call(num_selected=2 + odd)),
        ('q is .* on rank 0', lambda odd: call(q=tokens['q'].detach() if odd else tokens['q'])),
        ('q_offset is given, but must be None', lambda odd: call(q_offset=3 if odd else None)),
        ('compress_k is a int', lambda odd: call(compress_k=3 if odd else mean_of_block)),
        # With six tokens, the last rank has no block.
        (r'compress_mlp \(keys\) must map', lambda odd: call_short(compress_k=lambda blocks: blocks.mean(-1))),
        ('unexpected keyword', lambda odd: call(**{'windows': 3} if odd else {})),
    ]
    for message, function in calls:
        with pytest.raises(Exception, match=message) as raised:
            function(rank == 1)
        assert isinstance(raised.value, ValueError) or (rank == 1 and isinstance(raised.value, TypeError)), message
        assert '\n' not in str(raised.value)
        total = torch.ones(1)
        dist.all_reduce(total)
        assert total == 3
    with pytest.raises(ValueError, match='attention is called without its model'):
        model.blocks[0].attention(torch.zeros(1, 4, 16, dtype=torch.float64))


def draw_dropout() -> None:
    """Calls of one rank and of all ranks have different seeds, though the ranks have one random state."""
    model, ids, rank, seeds = apply_cp(make_model(sparse={'dropout': 0.5}), line()), make_ids(2), dist.get_rank(), []
    inner = functional.nsa

    def record(*args: Any, dropout_seed: Tensor, **settings: Any) -> Tensor:
        seeds.append(int(dropout_seed))
        return inner(*args, dropout_seed=dropout_seed, **settings)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(functional, 'nsa', record)
        model(ids[:, 11 * rank : 11 * (rank + 1)], return_loss=True).backward()
    found: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(found, seeds)
    every = [seed for of_rank in found for seed in of_rank]
    assert len(set(every)) == len(every)


def refuse_models() -> None:
    flat, named = line(), init_device_mesh('cpu', (3, 1), mesh_dim_names=('context', 'data'))
    other = make_model()
    other.blocks[1].attention = nn.Sequential(other.blocks[1].attention)  # type: ignore[assignment]
    cases: list[tuple[str, Any, Any]] = [
        ('mesh has 2 dimensions, but must have 1', make_model(), named),
        ("model is 'Linear', but must be a Transformer", nn.Linear(2, 2), flat),
        ('use_sparse_attn of the model is False, but must be True', make_model('dense'), flat),
        ('attention of a block is a Sequential', other, flat),
        ('model is divided already', apply_cp(make_model(), flat), flat),
        ('model is sharded already', apply_fsdp(make_model(), flat), flat),
    ]
    for message, model, mesh in cases:
        with pytest.raises(ValueError, match=message):
            apply_cp(model, mesh)


def errors() -> None:
    refuse_models()
    draw_dropout()
    raise_on_all_ranks()


@full
def test_wrong_arguments(tmp_path: Path) -> None:
    run_processes(errors, 3, tmp_path)


def call_inside() -> None:
    experimental = pytest.importorskip('torch.distributed.tensor.experimental')
    models: list[Transformer] = [make_model('separate'), make_model('merged'), make_model('dense')]
    mesh, ids = init_device_mesh('cpu', (1,)), make_ids(1)
    for model in models:
        expected = model(ids)
        with (
            experimental.context_parallel(mesh, buffers=[torch.zeros(1, 32)], buffer_seq_dims=[1]),
            pytest.raises(ValueError, match="inside PyTorch's context_parallel, but must not be"),
        ):
            model(ids)
        assert torch.equal(model(ids), expected)


@full
def test_it_is_refused(tmp_path: Path) -> None:
    run_processes(call_inside, 1, tmp_path)
