"""Settings of a layer beside its weights in a state dict, so that weights made under other settings do not load."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import nn

_KEY = 'settings'


class LayerWithSettings(nn.Module):
    """Base of layers whose state dicts record the settings that their weights were made with.

    The settings stand in the metadata of the state dict, where `nn.Module` keeps versions, and add no key. Loading
    compares them and reports each that differs, as it does sizes. Formats that drop metadata (safetensors, DCP) and
    older state dicts load without the comparison, and so does `dict(state_dict)`.
    """

    def __init__(self) -> None:
        super().__init__()
        self.register_state_dict_post_hook(_record)
        self.register_load_state_dict_pre_hook(_compare)

    @property
    def weight_settings(self) -> Mapping[str, bool | int | float | str | None]:
        """Settings that determine the meaning of the weights, in addition to their shapes."""
        raise NotImplementedError


def _record(layer: LayerWithSettings, state_dict: Any, prefix: str, local_metadata: dict[str, Any]) -> None:
    local_metadata[_KEY] = dict(layer.weight_settings)


def _compare(
    layer: LayerWithSettings,
    state_dict: Any,
    prefix: str,
    local_metadata: dict[str, Any],
    strict: bool,
    missing_keys: list[str],
    unexpected_keys: list[str],
    errors: list[str],
) -> None:
    recorded = local_metadata.get(_KEY, {})
    for name, value in layer.weight_settings.items():
        made_with = recorded.get(name, value)
        if value != made_with:
            errors.append(
                f'{prefix}{name} is {value!r}, but must be {made_with!r}, with which the state dict was made (load '
                'dict(state_dict) to skip this check)'
            )
