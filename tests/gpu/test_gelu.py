# SPDX-License-Identifier: Apache-2.0
"""Our GELU, compiled for a GPU, is PyTorch's to what bfloat16 rounds."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional as F

from onea.vit.compiled import can_compile
from onea.vit.gelu import Gelu

cuda = torch.device("cuda")
pytestmark = [
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
    pytest.mark.skipif(not can_compile(cuda), reason="needs a compiler"),
]


def test_compiled_in_bfloat16_it_differs_by_rounding_alone():
    x = torch.linspace(-8, 8, 4096, device=cuda).bfloat16()
    mine, exact = x.clone().requires_grad_(), x.double().requires_grad_()
    found, wanted = torch.compile(Gelu(), fullgraph=True)(mine), F.gelu(exact)
    found.backward(torch.ones_like(found))
    wanted.backward(torch.ones_like(wanted))
    assert found.dtype == torch.bfloat16
    torch.testing.assert_close(found.double(), wanted.detach(), rtol=2**-8, atol=1e-6)
    torch.testing.assert_close(mine.grad.double(), exact.grad, rtol=2**-8, atol=1e-6)
