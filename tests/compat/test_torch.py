"""The private names of torch that we need are there, and mean what we take them for."""

from __future__ import annotations

import torch
from torch.autograd import forward_ad

from fusedrl.compat import torch as words


def test_forward_mode_is_on_inside_of_its_level_alone():
    assert not words.in_forward_mode()
    with forward_ad.dual_level():
        assert words.in_forward_mode()


def test_a_trace_takes_the_answer_of_a_marked_function_as_a_constant():
    @words.constant_in_traces
    def answer():
        return len(str(torch.__config__.show())) > 0  # a trace would stop here

    compiled = torch.compile(lambda x: x + 1 if answer() else x, backend="eager", fullgraph=True)
    assert compiled(torch.zeros(1)) == 1
