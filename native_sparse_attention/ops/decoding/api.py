"""Backend choice for a decoding step."""

from __future__ import annotations

import torch
from torch import Tensor

from native_sparse_attention.core.backend import BackendChoice, choose_backend, serves
from native_sparse_attention.core.geometry import overlapping_blocks
from native_sparse_attention.ops.decoding.step import Storage

# Largest number of new tokens per row and step.
MAX_NEW_TOKENS = 16
# Largest group, whose heads a tile holds.
MAX_GROUP = 64
# Most compressed blocks that overlap a selection block, since a tile holds all of them.
MAX_OVERLAPPING = 128
# Most selected blocks per query, which a program holds in registers.
MAX_SELECTED = 512
# Most selection blocks per row: 65,535 programs with chunks of 64 blocks.
MAX_BLOCKS = 64 * 65535


def backend_of(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    storage: Storage,
    compress: tuple[int, int],
    selection_block_size: int,
    num_selected: int,
    softcap: float | None = None,
    has_sinks: bool = False,
    backend: str = 'auto',
) -> BackendChoice:
    """Return the backend that serves a step of q `[B, T, HQ, D]`, k and v on a cache with blocks `compress` = (l, d):
    'triton', or 'eager' for the ops one by one.
    """
    sizes = (*compress, selection_block_size)

    def unsupported() -> str | None:
        if softcap is not None:
            return f'softcap is {softcap}, but its kernels cap no logits'
        if has_sinks:
            return 'there are sinks, but its kernels have none'
        return _unsupported(q, k, v, storage, sizes, num_selected)

    candidates = {'triton': unsupported, 'eager': serves}
    return choose_backend('decoding', 'eager' if backend == 'flex' else backend, q.device, candidates)


def _unsupported(
    q: Tensor, k: Tensor, v: Tensor, storage: Storage, sizes: tuple[int, int, int], num_selected: int
) -> str | None:
    """Return the reason why the Triton kernels do not support a step, or None."""
    from native_sparse_attention.ops._triton import support

    num_tokens, group = q.shape[1], q.shape[2] // k.shape[2]
    if not 1 <= num_tokens <= MAX_NEW_TOKENS:
        return f'there are {num_tokens} new tokens, but its kernels take 1 to {MAX_NEW_TOKENS}'
    if group > MAX_GROUP:
        return f'{group} heads share a key head, but its kernels take up to {MAX_GROUP}'
    overlapping = len(overlapping_blocks(*sizes))
    if overlapping > MAX_OVERLAPPING:
        return (
            f'{overlapping} compressed blocks overlap a selection block, but its kernels take up to {MAX_OVERLAPPING}'
        )
    if num_selected > MAX_SELECTED:
        return f'n is {num_selected}, but its kernels choose up to {MAX_SELECTED} blocks'
    num_blocks = -(-storage.capacity // sizes[2])
    if num_blocks > MAX_BLOCKS:
        return f'a row has {num_blocks} selection blocks, but its kernels choose from up to {MAX_BLOCKS}'
    if storage.capacity > support.MAX_TOKENS:
        return f'a row has {storage.capacity} tokens, but its kernels count up to {support.MAX_TOKENS}'
    if storage.k.dtype not in support.DTYPES:
        return f'the cache has dtype {storage.k.dtype}, but its kernels compute in float32'
    tensors = {name: tensor for name, tensor in storage._asdict().items() if isinstance(tensor, torch.Tensor)}
    for name, tensor in tensors.items():
        if tensor.stride(-1) != 1:
            return f'{name} has strides {tensor.stride()}, but its kernels need neighbours in the last dimension'
    return support.unsupported(q, k, v)
