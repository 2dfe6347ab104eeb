from native_sparse_attention.ops.rotary.api import fan_out, rotary

__all__ = ['fan_out', 'rotary']
