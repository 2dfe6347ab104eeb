"""Mixins that the converted models of all families share, before the classes of a family."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from native_sparse_attention.core.checks import shown
from native_sparse_attention.integrations.transformers.attention import NSAAttention
from native_sparse_attention.integrations.transformers.cache import NSACacheLayer, check_cache, check_even
from native_sparse_attention.integrations.transformers.config import NSAConfig
from native_sparse_attention.integrations.transformers.layout import make_layout, real_positions

# The argument that holds the cache: `cache` from transformers 5.24 on.
_CACHE_NAMES = ('cache', 'past_key_values')
# Kinds of a layer in `layer_types`.
_FULL, _SPARSE = 'full_attention', 'nsa_attention'


class NSAModelConfig:
    """Mixin of a family's configuration. `nsa` takes an `NSAConfig` or its settings, and holds them as values of JSON.

    Written out, `layer_types` names the converted layers 'nsa_attention', which the dense family refuses: it would
    load the weights and attend densely. config.json has no `num_hidden_layers`, without which `PreTrainedConfig` itself
    accepts these names: Trainer reads it so when it resumes.
    """

    nsa: Any = None
    num_hidden_layers: int
    base_model_tp_plan: Any = None  # heads of the compression networks are not sharded

    def __setattr__(self, name: str, value: Any) -> None:
        super().__setattr__(name, NSAConfig.of(value).to_dict() if name == 'nsa' else value)

    def __post_init__(self, **kwargs: Any) -> None:
        """Take `layer_types` as it is written out. kwargs: what is no field of the family, as it is none of Llama."""
        types = getattr(self, 'layer_types', None) or kwargs.get('layer_types') or []
        if _SPARSE in types:
            self.num_hidden_layers = len(types)
            if kwargs.pop('layer_types', None) is None:
                self.layer_types = [_FULL if kind == _SPARSE else kind for kind in types]
        super().__post_init__(**kwargs)  # type: ignore[misc]

    def to_dict(self) -> dict[str, Any]:
        output = super().to_dict()  # type: ignore[misc]
        types = list(output.get('layer_types') or [_FULL] * self.num_hidden_layers)
        layers = NSAConfig.of(self.nsa).layers
        chosen = [i for i, kind in enumerate(types) if kind == _FULL] if layers is None else layers
        output['layer_types'] = [_SPARSE if i in chosen else kind for i, kind in enumerate(types)]
        return output

    def to_diff_dict(self) -> dict[str, Any]:
        output = super().to_diff_dict()  # type: ignore[misc]
        del output['num_hidden_layers']
        return output

    @classmethod
    def from_dict(cls, config_dict: dict[str, Any], **kwargs: Any) -> Any:
        config_dict = {**config_dict, 'model_type': cls.model_type}  # type: ignore[attr-defined]
        if isinstance(kwargs.get('nsa'), Mapping):  # changes some of the settings
            kwargs['nsa'] = {**(config_dict.get('nsa') or {}), **kwargs['nsa']}
        return super().from_dict(config_dict, **kwargs)  # type: ignore[misc]


class NSAPreTrained(nn.Module):
    """Mixin of all models of a family."""

    config: Any
    base_class: type[NSAModel]

    def __init__(self, config: Any, *args: Any, **kwargs: Any) -> None:
        super().__init__(config, *args, **kwargs)
        convert_layers(self, NSAConfig.of(config.nsa), added_like_layers=False)
        self.post_init()  # type: ignore[operator]  # initialises what was added

    def save_pretrained(
        self, save_directory: Any, is_main_process: bool = True, state_dict: Any = None, *args: Any, **kwargs: Any
    ) -> None:
        """As that of transformers. Raises ValueError if tensors are divided over ranks, before anything is written."""
        for name, tensor in (self.state_dict() if state_dict is None else state_dict).items():
            if hasattr(tensor, 'full_tensor') and not kwargs.get('distributed_checkpoint'):
                raise ValueError(
                    f'{name} is a {type(tensor).__name__}, but must be whole to be saved: pass state_dict, as '
                    f'get_model_state_dict returns it with full_state_dict=True'
                )
        super().save_pretrained(save_directory, is_main_process, state_dict, *args, **kwargs)  # type: ignore[misc]

    def _init_weights(self, module: nn.Module) -> None:
        """Initialise a module; parameters of added ones stay where a checkpoint has given their values."""
        if not getattr(module, 'is_added_by_nsa', False):
            return super()._init_weights(module)  # type: ignore[misc]
        is_new = any(not getattr(p, '_is_hf_initialized', False) for p in module.parameters(recurse=False))
        reset = getattr(module, 'reset_parameters', None)
        if is_new and reset is not None:
            reset()
        return None


class NSAModel(NSAPreTrained):
    """Mixin of the model without a head: it finds the layout of its tokens once, for all layers."""

    attention_class: type[NSAAttention]
    layers: Any
    rotary_emb: Any
    training: bool

    forward_names: tuple[str, ...]  # arguments of the family's forward
    cache_name: str

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        cls.forward_names = tuple(inspect.signature(super().forward).parameters)[1:]  # without self
        cls.cache_name = next(name for name in _CACHE_NAMES if name in cls.forward_names)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """As the family's model. attention_mask: `[B, S]`, bool or numbers, 0 and 1, or None.

        Sequences may be packed: by position_ids that start again, without a mask and a cache given; or by cu_seq_lens_q
        and cu_seq_lens_k. No cache is made then. Positions that are not given count from the first real token of a row
        or sequence, because scores of rotated keys depend on them.

        Raises ValueError for other masks, for packed sequences with a cache, for a cache whose layers do not hold the
        same tokens, for output_attentions, for a `config.nsa` that is not that of the layers, and where `torch.jit`
        traces it.
        """
        if torch.jit.is_tracing():
            raise ValueError('the model is traced by torch.jit, but must be exported by torch.export')
        kwargs = {**dict(zip(self.forward_names, args, strict=False)), **kwargs}
        if kwargs.get('output_attentions') or getattr(self.config, 'output_attentions', False):
            raise ValueError('output_attentions is True, but must be False: sparse attention has no matrix of weights')
        caches = [kwargs.pop(name) for name in _CACHE_NAMES if name in kwargs]
        cache: Any = next((c for c in caches if c is not None), None)
        ids, embeds = kwargs.get('input_ids'), kwargs.get('inputs_embeds')
        if (tokens := embeds if ids is None else ids) is not None:
            self._check_settings()
            mask, first = kwargs.get('attention_mask'), self.sparse_layers[0]
            seen = past = None
            if cache is not None:
                check_cache(cache)
                if not torch.compiler.is_compiling():
                    # Without the layers that `assistant_early_exit` leaves out.
                    check_even(cache, [i for i in self.sparse_layers if i < self.config.num_hidden_layers])
                seen = int(cache.get_seq_length(first))
            layout = make_layout(
                *(tokens, mask, kwargs.get('position_ids')),
                (kwargs.get('cu_seq_lens_q'), kwargs.get('cu_seq_lens_k')),
                seen,
                _rope_factor(self.rotary_emb),
                self.config.nsa['dense_below'] > 0,
            )
            if cache is not None and seen and isinstance(layer := cache.layers[first], NSACacheLayer):
                past = layer.padded_lengths
                if layer.batch_size != len(tokens):
                    raise ValueError(f'the inputs have {len(tokens)} rows, but the cache holds {layer.batch_size}')
                if mask is not None:
                    layer.check_past(mask)
            if kwargs.get('position_ids') is None:
                kwargs['position_ids'] = real_positions(layout, tokens, seen or 0, past)
            if layout.cu_seqlens is not None and cache is None:
                kwargs['use_cache'] = False
            kwargs['nsa_layout'] = layout
            if len(self.sparse_layers) == len(self.layers):
                # A mask of 4 dimensions is passed through; the family makes one from anything else.
                kwargs['attention_mask'] = tokens.new_empty(1, 1, 1, 1)
        return super().forward(**kwargs, **{self.cache_name: cache})

    def _check_settings(self) -> None:
        if torch.compiler.is_compiling():
            return
        used, held = self.layers[self.sparse_layers[0]].self_attn.nsa.to_dict(), self.config.nsa
        for name, value in used.items():
            if held[name] != value:
                raise ValueError(
                    f'config.nsa has {name} {shown(held[name])}, but must have that of the layers, {shown(value)}: '
                    f'change_settings changes both'
                )

    @property
    def sparse_layers(self) -> list[int]:
        """Indices of the layers with sparse attention."""
        return [i for i, layer in enumerate(self.layers) if isinstance(layer.self_attn, NSAAttention)]


class NSAForCausalLM(NSAPreTrained):
    """Mixin of the model with a language modelling head."""

    @staticmethod
    def create_masks_for_generate(config: Any, *args: Any, **kwargs: Any) -> Tensor | None:
        """Return the padding mask as it is, where `generate` prepares masks of 4 dimensions for a static cache."""
        names = ('inputs_embeds', 'attention_mask')
        return {**dict(zip(names, args, strict=False)), **kwargs}['attention_mask']

    def get_compiled_call(self, compile_config: Any) -> Any:
        """Return the forward as it is, but compiled where compile_config is given.

        On a GPU, `generate` compiles steps over a static cache unasked. Steps replay recorded launches instead.
        """
        return self.__call__ if compile_config is None else super().get_compiled_call(compile_config)  # type: ignore[misc]

    def init_continuous_batching(self, *_: Any, **__: Any) -> Any:
        """Refuse."""
        raise ValueError(
            'continuous batching is requested, but its paged cache of dense keys does not serve sparse attention: use '
            'generate'
        )


def convert_layers(model: Any, nsa: NSAConfig, added_like_layers: bool) -> None:
    """Replace attention modules of a model in place, and write the settings to its configuration.

    model: of a family's converted class, with dense layers. added_like_layers: give new modules the dtype and device of
    the layers' weights, rather than those that PyTorch gives new tensors.

    Raises ValueError for layers that do not exist or do not have full causal attention.
    """
    base = model if isinstance(model, NSAModel) else model.base_model
    layers = list(base.layers)
    if any(isinstance(layer.self_attn, NSAAttention) for layer in layers):
        return
    indices = _chosen_layers(layers, nsa)
    if base is not model:
        base.__class__ = model.base_class
    nsa = nsa.replace(layers=None if len(indices) == len(layers) else indices)
    for index in indices:
        like = layers[index].input_layernorm.weight if added_like_layers else None
        base.attention_class.convert(layers[index].self_attn, nsa, like)
        for added in layers[index].self_attn.added_modules():
            for module in added.modules():
                module.is_added_by_nsa = True
    model.config.nsa = nsa


def _chosen_layers(layers: list[Any], nsa: NSAConfig) -> list[int]:
    reasons = [_unsupported(layer.self_attn) for layer in layers]
    if nsa.layers is None:
        indices = [i for i, reason in enumerate(reasons) if reason is None]
        if not indices:
            raise ValueError(
                f'model has no layer to convert: its layer 0 has {reasons[0]}, but full causal attention is required'
            )
        return indices
    for index in nsa.layers:
        if index >= len(layers):
            raise ValueError(f'layers has {index}, but the model has {len(layers)} layers')
        if reasons[index] is not None:
            raise ValueError(f'layers has {index}, but that layer has {reasons[index]}, not full causal attention')
    return list(nsa.layers)


def _unsupported(attention: Any) -> str | None:
    """Return the kind of attention that sparse attention does not replace, or None."""
    window = getattr(attention, 'sliding_window', None)
    if not hasattr(attention, 'sliding_window'):  # Mistral and Llama
        window = getattr(attention.config, 'sliding_window', None)
    if getattr(attention, 'layer_type', None) == 'full_attention':
        window = None
    if window is not None:
        return f'sliding window attention (sliding_window is {window})'
    return None if attention.is_causal else 'bidirectional attention'


def _rope_factor(rotary_emb: Any) -> float:
    names = ('full_attention_attention_scaling', 'attention_scaling')
    return next((getattr(rotary_emb, name) for name in names if hasattr(rotary_emb, name)), 1.0)
