"""Training across processes with the engines of PyTorch.

Parallelism is applied to a model that exists, in this order: tensor parallelism, activation checkpointing, compilation,
sharding.
"""

import torch.distributed

if not torch.distributed.is_available():
    raise ImportError(
        'torch was built without torch.distributed, which native_sparse_attention.distributed needs: install a build '
        'of torch that has it'
    )

from native_sparse_attention.distributed.fsdp import apply_fsdp, hold_weights
from native_sparse_attention.distributed.tensor_parallel import apply_tp

__all__ = ['apply_fsdp', 'apply_tp', 'hold_weights']
