"""What the checks of several ops use."""

from __future__ import annotations

import torch

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
OFFSETS = torch.tensor([0, 3, 3, 4, 7])
TOLERANCE = {torch.float32: 1e-6, torch.bfloat16: 8e-3, torch.float16: 1e-3}  # of stored gradients
