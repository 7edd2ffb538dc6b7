# SPDX-License-Identifier: Apache-2.0
"""Our GELU is PyTorch's to far less than bfloat16 rounds, and so is its gradient."""

from __future__ import annotations

import torch
from torch.nn import functional as F
from toys import toy

from onea.vit.gelu import Gelu, _Gelu, gelu, gelu_gradient

X = torch.cat([torch.linspace(-12, 12, 100_001, dtype=torch.float64), torch.tensor([-1e4, -0.0, 0.0, 1e4]).double()])


def test_it_is_off_by_less_than_a_millionth():
    torch.testing.assert_close(gelu(X.float()).double(), F.gelu(X), rtol=1e-6, atol=1e-6)


def test_so_is_its_gradient():
    x = X.clone().requires_grad_()
    F.gelu(x).sum().backward()
    found = gelu_gradient(torch.ones(len(X)), X.float())
    torch.testing.assert_close(found.double(), x.grad, rtol=1e-6, atol=1e-6)


def test_the_function_gives_both_in_the_precision_of_its_input():
    x = torch.randn(4, 7, generator=torch.Generator().manual_seed(1)).bfloat16().requires_grad_()
    y = _Gelu.apply(x)
    y.backward(torch.ones_like(y))
    assert y.dtype == x.grad.dtype == torch.bfloat16
    torch.testing.assert_close(y, F.gelu(x.detach()))
    torch.testing.assert_close(x.grad, gelu_gradient(torch.ones_like(y), x.detach()))


def test_networks_have_it_where_they_had_pytorchs():
    vit = toy("DINOv2").vit
    assert all(type(block.mlp.act) is Gelu for block in vit.blocks)
    x = torch.randn(3, 5, generator=torch.Generator().manual_seed(2))
    assert torch.equal(Gelu()(x), F.gelu(x)), "on a CPU it is PyTorch's"
    assert torch.equal(Gelu("tanh")(x), F.gelu(x, approximate="tanh"))
