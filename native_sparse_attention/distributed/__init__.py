"""Training across processes with the engines of PyTorch.

Parallelism is applied to a model that exists, in this order: tensor parallelism, context or pipeline parallelism,
activation checkpointing, compilation, sharding.
"""

import torch.distributed

if not torch.distributed.is_available():
    raise ImportError(
        'torch was built without torch.distributed, which native_sparse_attention.distributed needs: install a build '
        'of torch that has it'
    )

from native_sparse_attention.distributed.checkpoint import ProjectionLoadPlanner
from native_sparse_attention.distributed.context_attention import context_parallel_nsa
from native_sparse_attention.distributed.context_parallel import apply_cp
from native_sparse_attention.distributed.fsdp import apply_fsdp, hold_weights
from native_sparse_attention.distributed.pipeline import apply_pp, next_token_loss
from native_sparse_attention.distributed.tensor_parallel import apply_tp

__all__ = [
    'ProjectionLoadPlanner',
    'apply_cp',
    'apply_fsdp',
    'apply_pp',
    'apply_tp',
    'context_parallel_nsa',
    'hold_weights',
    'next_token_loss',
]
