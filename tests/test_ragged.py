"""ragged: every representation packs, unpacks, and shares memory where it says so."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fusedrl import ragged


def samples(lengths, trailing=()):
    return [torch.randn(n, *trailing) for n in lengths]


@given(
    lengths=st.lists(st.integers(0, 5), min_size=1, max_size=6),
    trailing=st.sampled_from([(), (3,)]),
)
def test_every_representation_round_trips(lengths, trailing):
    tensors = samples(lengths, trailing)
    packed = ragged.from_list(tensors)
    assert packed.offsets.dtype == torch.int64
    for nested in (
        torch.nested.nested_tensor(tensors, layout=torch.strided),
        ragged.to_jagged(packed),
        ragged.to_strided(packed),
        ragged.to_strided(packed, lengths),
    ):
        again = ragged.from_nested(nested)
        assert torch.equal(again.offsets, packed.offsets)
        assert torch.equal(again.values.reshape(packed.values.shape), packed.values)
    for ours, theirs in zip(ragged.to_list(packed), tensors, strict=True):
        assert torch.equal(ours, theirs)


def test_nested_conversions_share_memory():
    packed = ragged.from_list(samples([2, 3]))
    for nested in (ragged.to_jagged(packed), ragged.to_strided(packed)):
        assert ragged.from_nested(nested).values.data_ptr() == packed.values.data_ptr()
    assert ragged.to_list(packed)[0].data_ptr() == packed.values.data_ptr()


def test_a_jagged_view_with_holes_is_compacted():
    nested = torch.nested.nested_tensor(samples([4, 5]), layout=torch.jagged)
    lengths = torch.tensor([2, 3])
    holes = torch.nested.nested_tensor_from_jagged(
        nested.values(), nested.offsets(), lengths=lengths
    )
    values, offsets = ragged.from_nested(holes)
    assert offsets.tolist() == [0, 2, 5]
    assert torch.equal(values, torch.cat([nested.values()[:2], nested.values()[4:7]]))


def test_a_gradient_flows_through_a_view_with_holes():
    padded = torch.randn(2, 6, 3, requires_grad=True)
    starts, lengths = torch.tensor([0, 1]), torch.tensor([2, 3])
    nested = torch.nested.narrow(padded, 1, starts, lengths, layout=torch.jagged)
    values, offsets = ragged.from_nested(nested)
    assert offsets.tolist() == [0, 2, 5]
    assert torch.equal(values, torch.cat([padded[0, :2], padded[1, 1:4]]))
    upstream = torch.randn(5, 3)
    values.backward(upstream)
    expected = torch.zeros(2, 6, 3)
    expected[0, :2], expected[1, 1:4] = upstream[:2], upstream[2:]
    assert torch.equal(padded.grad, expected)


def test_host_metadata_ignores_the_default_device():
    tensors = samples([2, 3])
    packed, jagged_lengths = ragged.from_list(tensors), torch.tensor([2, 3])
    with torch.device("meta"):
        again = ragged.from_nested(ragged.to_strided(packed))
        offsets = [ragged.offsets_of(lengths).tolist() for lengths in ([2, 3], jagged_lengths)]
    assert torch.equal(again.values, packed.values)
    assert again.offsets.tolist() == [0, 2, 5]
    assert offsets == [[0, 2, 5]] * 2


def test_refusals():
    with pytest.raises(ValueError, match="at least one tensor"):
        ragged.from_list([])
    uneven = torch.nested.nested_tensor([torch.zeros(2, 3), torch.zeros(2, 4)])
    with pytest.raises(ValueError, match="one ragged dimension"):
        ragged.from_nested(uneven)
    turned = torch.nested.nested_tensor([torch.zeros(2, 3)], layout=torch.jagged).transpose(1, 2)
    with pytest.raises(ValueError, match="column: expected a jagged tensor ragged in dimension 1"):
        ragged.from_nested(turned, "column")
    for empty in (torch.nested.nested_tensor([]), torch.nested.nested_tensor([torch.tensor(1.0)])):
        with pytest.raises(ValueError, match="nested: expected at least one sequence"):
            ragged.from_nested(empty)
    with pytest.raises(ValueError, match="ragged: expected at least one sequence"):
        ragged.to_strided(ragged.Packed(torch.zeros(0), torch.tensor([0])))


def test_strided_views_of_a_slice_start_at_the_slice():
    packed = ragged.Packed(torch.arange(10.0)[4:], torch.tensor([0, 2, 6]))
    nested = ragged.to_strided(packed)
    assert [row.tolist() for row in nested.unbind()] == [[4, 5], [6, 7, 8, 9]]
