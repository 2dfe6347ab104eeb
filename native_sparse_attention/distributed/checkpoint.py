"""Loading of `torch.distributed.checkpoint` between models before and after `apply_tp`."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint import DefaultLoadPlanner, LoadPlan, ReadItem
from torch.distributed.checkpoint.default_planner import create_default_local_load_plan
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorStorageMetadata
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list
from torch.distributed.tensor import DTensor

from native_sparse_attention.nn.linear import projection_names

_FORMS = [['weight'], *(list(projection_names([1] * count)) for count in (3, 7))]
_OF_PROJECTION = re.compile(rf'(.*\bto_qkv\.)({"|".join(name for form in _FORMS for name in form)})(\..*|)')


class ProjectionLoadPlanner(DefaultLoadPlanner):
    """Load projections `to_qkv` from a checkpoint of either form, for `torch.distributed.checkpoint.load(planner=…)`.

    A model has one weight for queries, keys and values, and after `apply_tp` a weight for each. Each rank reads the
    rows of its own shards alone, and nothing is communicated. Optimizer state takes part if its names are those of
    parameters: `StateDictOptions(flatten_optimizer_state_dict=True)`.

    Args:
        allow_partial_load: leave values as they are that the checkpoint does not have.

    Raises:
        ValueError: a projection in the checkpoint has another number of rows.
    """

    def __init__(self, allow_partial_load: bool = False) -> None:
        super().__init__(allow_partial_load=allow_partial_load)

    def create_local_plan(self) -> LoadPlan:
        assert self.metadata is not None
        whole, stored = self.state_dict, self.metadata.state_dict_metadata
        others = {key: _other_form(key, stored) for key in whole if key not in stored}
        items = [item for key, names in others.items() if names for item in self._items(key, names)]
        # Keys without another form stay, so that they are reported as missing.
        self.state_dict = {key: value for key, value in whole.items() if not others.get(key)}
        try:
            plan = super().create_local_plan()
        finally:
            self.state_dict = whole
        return LoadPlan([*plan.items, *items])

    def _items(self, key: str, names: list[str]) -> list[ReadItem]:
        """Return what to read for the value of a key. names: of the other form, in the order of the rows."""
        assert self.metadata is not None
        stored, value = self.metadata.state_dict_metadata, self.state_dict[key]
        if not isinstance(value, Tensor) or value.ndim == 0:  # such as the number of steps, equal for all parts
            plan = create_default_local_load_plan({names[0]: value}, self.metadata)
            return [replace(item, dest_index=replace(item.dest_index, fqn=key)) for item in plan.items]
        chunks = value.__create_chunk_list__() if isinstance(value, DTensor) else [_all_of(value)]  # type: ignore[attr-defined]
        first, total = self._rows(key)
        rows = [stored[name].size[0] for name in names]  # type: ignore[union-attr]
        if total != sum(rows):
            raise ValueError(f'{key} is of a projection of {total} rows, but the checkpoint has one of {sum(rows)}')
        items: list[ReadItem] = []
        for name, start in zip(names, [sum(rows[:index]) - first for index in range(len(rows))], strict=True):
            part = stored[name]
            assert isinstance(part, TensorStorageMetadata)
            moved = [replace(chunk, offsets=_moved(chunk.offsets, -start)) for chunk in chunks]
            for item in create_read_items_for_chunk_list(name, part, moved):
                assert item.dest_index.offset is not None
                offset = _moved(item.dest_index.offset, start)
                items.append(replace(item, dest_index=MetadataIndex(key, offset, item.dest_index.index)))
        return items

    def _rows(self, key: str) -> tuple[int, int]:
        """Return the row of the whole projection at which the part of a key starts, and the number of its rows."""
        prefix, name, suffix = _OF_PROJECTION.fullmatch(key).groups()  # type: ignore[union-attr]
        form = next(form for form in _FORMS[::-1] if all(f'{prefix}{each}{suffix}' in self.state_dict for each in form))
        rows = [self.state_dict[f'{prefix}{each}{suffix}'].shape[0] for each in form]
        return sum(rows[: form.index(name)]), sum(rows)


def _other_form(key: str, stored: dict[str, Any]) -> list[str]:
    """Return the names of the other form of a projection that a checkpoint has in place of a key, or none."""
    match = _OF_PROJECTION.fullmatch(key)
    if match is None:
        return []
    prefix, _, suffix = match.groups()
    forms = ([f'{prefix}{name}{suffix}' for name in form] for form in _FORMS)
    return next((form for form in forms if all(name in stored for name in form)), [])


def _all_of(tensor: Tensor) -> ChunkStorageMetadata:
    return ChunkStorageMetadata(torch.Size([0] * tensor.ndim), tensor.size())


def _moved(offsets: torch.Size, rows: int) -> torch.Size:
    return torch.Size((offsets[0] + rows, *offsets[1:]))
