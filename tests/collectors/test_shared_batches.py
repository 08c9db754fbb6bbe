"""Batches in shared memory: what one process packs another one uses where it lies."""

from __future__ import annotations

import torch
from tensordict import TensorDict, lazy_stack

from fusedrl.collectors.shared_batches import Mappings, Segments


def test_a_batch_is_used_where_it_lies_and_its_segment_again_afterwards():
    segments, mappings = Segments(), Mappings()
    batch = lazy_stack([TensorDict(x=torch.randn(n), text=f"row {n}") for n in range(1, 5)])
    got = mappings.unpack(segments.pack(batch))
    assert all((a == b).all() for a, b in zip(got.unbind(0), batch.unbind(0), strict=True))
    row = got[2]["x"][1:]
    del got
    assert mappings.released() == []
    assert segments.pack(batch).index == 1
    row.zero_()
    del row
    assert mappings.released() == [0]
    segments.release([0])
    assert segments.pack(batch).index == 0
    segments.close()
    mappings.close()
