"""The memory of a new channel, in host memory or on a CUDA device."""

from __future__ import annotations

import torch

from fusedrl import _host
from fusedrl.channel.memory import Manifest, Memory


def reserve(
    manifest: Manifest, where: torch.device, slots: int, max_readers: int, session: str
) -> tuple[Memory, _host.Publisher]:
    """The memory of a new channel's slots, and the publisher's end of it.

    Args:
        manifest: the description, as of slots in host memory.
        where: the device of the slots.
        slots: number of slots.
        max_readers: largest number of readers at a time.
        session: a name that no other channel has.

    Raises:
        ValueError: a device that is neither the CPU nor a CUDA device.
        RuntimeError: the kernel refuses the memory.
    """
    size, memory = manifest.layout.nbytes, None
    if where.type == "cuda":
        from fusedrl.channel.cuda import CudaMemory

        memory = CudaMemory.create(where, slots, size)
        size, manifest = 0, manifest._replace(memory=memory.manifest())
    elif where.type != "cpu":
        raise ValueError(
            f"device: expected cpu or cuda, got {where}; device='cpu' serves any machine"
        )
    try:
        end = _host.Publisher(slots, size, max_readers, session, manifest.to_bytes())
    except OSError as error:
        raise RuntimeError(
            f"channel: expected {slots * size} bytes of shared memory, got '{error.strerror}'; "
            f"where memory is short, create the channel with fewer slots than {slots}, or in half "
            "the width (dtype=torch.bfloat16)"
        ) from error
    return memory or Memory(end, slots, size), end
