# SPDX-License-Identifier: Apache-2.0
"""The Triton kernels for short sequences, interpreted on the CPU, against PyTorch's attention."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from support.tiny import write_tiny_vit
from timm.models.vision_transformer import Attention
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn import functional as F

from onea.vit.adapter import Adapters
from onea.vit.backbones import load_backbone
from onea.vit.blocks import attention
from onea.vit.short_attention import is_supported, short_attention

HEADS = 2
# The interpreter multiplies bfloat16 incorrectly; float16 is rounded at the same places. Probabilities (or
# their gradients) and results are rounded, by half of eps; in float32, only the order of summation differs.
BOUNDS = {torch.float32: 1e-5, torch.float16: 2 * torch.finfo(torch.float16).eps}
CASES = [
    *(
        (torch.float32, *shape)
        for shape in ((1, 64), (16, 32), (33, 64), (64, 64), (65, 64), (65, 32), (80, 64), (128, 32))
    ),
    *((torch.float16, tokens, 64) for tokens in (33, 65, 80)),
]
INPUTS, OUTPUTS = "inputs.safetensors", "outputs.safetensors"


def interpret(folder: Path) -> None:
    """Run the kernels in another process, in which Triton has not been imported before."""
    found = {}
    for name, value in load_file(folder / INPUTS).items():
        kind, case = name.split(" ", 1)
        if kind == "qkv":
            qkv, upper = value.requires_grad_(), load_file(folder / INPUTS)[f"upper {case}"]
            out = short_attention(qkv, HEADS)
            found[f"out {case}"] = out.detach()
            (found[f"grad {case}"],) = torch.autograd.grad(out, qkv, upper)
    calls, patched = [], pytest.MonkeyPatch()
    patched.setattr("onea.vit.blocks.is_supported", lambda *_: True)
    patched.setattr("onea.vit.blocks.short_attention", lambda *given: calls.append(1) or short_attention(*given))
    save_file({**found, **trained(folder), "calls": torch.tensor(len(calls))}, folder / OUTPUTS)


def trained(folder: Path) -> dict[str, torch.Tensor]:
    """Features of a network, and the gradient of its adapters."""
    vit = load_backbone(str(folder / "vit.safetensors"))
    images = torch.randn(2, 3, vit.size, vit.size, generator=torch.Generator().manual_seed(1))
    hooks = Adapters(vit.depth, vit.width, 4, generator=torch.Generator().manual_seed(1), dropout=0.0)
    for adapter in hooks.adapters():
        torch.nn.init.normal_(adapter.up.weight, generator=torch.Generator().manual_seed(2))
    features = vit(images, hooks)
    gradients = torch.autograd.grad(features.square().sum(), list(hooks.parameters()))
    return {"features": features.detach(), "gradient": torch.cat([each.flatten() for each in gradients])}


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    if importlib.util.find_spec("triton") is None:
        pytest.skip("needs Triton")
    folder = tmp_path_factory.mktemp("short-attention")
    write_tiny_vit(folder / "vit.safetensors", depth=3, width=128)
    inputs, generator = {}, torch.Generator().manual_seed(1)
    for dtype, tokens, width in CASES:
        for kind, parts in (("qkv", 3), ("upper", 1)):
            value = torch.randn(2, tokens, parts * HEADS * width, generator=generator)
            inputs[f"{kind} {dtype} {tokens} {width}"] = value.to(dtype)
    save_file(inputs, folder / INPUTS)
    environment = os.environ | {"TRITON_INTERPRET": "1", "PYTHONPATH": os.pathsep.join(sys.path)}
    subprocess.run([sys.executable, __file__, str(folder)], check=True, env=environment, timeout=300)
    return folder


@pytest.mark.parametrize(("dtype", "tokens", "width"), CASES)
def test_values_and_gradients_are_those_of_pytorch(folder, dtype, tokens, width):
    inputs, outputs = load_file(folder / INPUTS), load_file(folder / OUTPUTS)
    case = f"{dtype} {tokens} {width}"
    qkv = inputs[f"qkv {case}"].double().requires_grad_()
    q, k, v = qkv.unflatten(2, (3, HEADS, width)).permute(2, 0, 3, 1, 4).unbind()
    expected = F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)
    (gradient,) = torch.autograd.grad(expected, qkv, inputs[f"upper {case}"].double())
    parts = [(outputs[f"out {case}"], expected.detach())]
    parts += zip(outputs[f"grad {case}"].chunk(3, 2), gradient.chunk(3, 2), strict=True)
    for found, right in parts:
        assert found.dtype == dtype
        assert float((found.double() - right).norm()) <= BOUNDS[dtype] * float(right.norm()) + 1e-6


def test_training_equals_training_with_pytorchs_attention(folder):
    outputs = load_file(folder / OUTPUTS)
    for name, expected in trained(folder).items():
        torch.testing.assert_close(outputs[name], expected, rtol=1e-4, atol=1e-4 * float(expected.abs().max()))
    assert int(outputs["calls"]) == 2, "of three blocks, the last has only one query"


@pytest.mark.parametrize(("extra", "prefixed"), [({}, True), ({"qk_norm": True}, False)])
def test_unsupported_attention_uses_pytorch(monkeypatch, extra, prefixed):
    monkeypatch.setattr("onea.vit.blocks.is_supported", lambda *_: True)
    monkeypatch.setattr("onea.vit.blocks.short_attention", lambda *_: pytest.fail("it does not do that"))
    attn = Attention(64, num_heads=2, norm_layer=torch.nn.LayerNorm, **extra).eval()
    h = torch.randn(2, 5, 64, generator=torch.Generator().manual_seed(1))
    prefix = (torch.zeros(1, 2, 3, 32), torch.zeros(1, 2, 3, 32)) if prefixed else None
    found = attention(attn, h, None, prefix, 5, None)
    assert found.shape == h.shape
    if not prefixed:
        torch.testing.assert_close(found, attn(h))


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        ({}, True),
        ({"tokens": 33}, True),
        ({"tokens": 128}, True),
        ({"tokens": 129}, False),
        ({"width": 48}, False),
        ({"dtype": torch.float32}, False),
        ({"device": "cpu"}, False),
        ({"requires_grad": False}, False),
    ],
)
def test_supported_inputs_in_a_compiled_pass(change, expected):
    if importlib.util.find_spec("triton") is None:
        pytest.skip("needs Triton")
    torch.compiler.reset()
    given = {"tokens": 65, "width": 64, "dtype": torch.bfloat16, "device": "cuda", "requires_grad": True} | change
    shape = 2, given.pop("tokens"), 3 * HEADS * given.pop("width")
    answers = []

    def compiled_support(qkv: torch.Tensor) -> torch.Tensor:
        answers.append(is_supported(qkv, HEADS))
        return qkv + 1

    with FakeTensorMode():
        qkv = torch.empty(shape, **given)
        torch.compile(compiled_support, backend="eager", fullgraph=True)(qkv)
        compiled_support(qkv)
    assert answers == [expected, False], "launching the kernel uncompiled takes longer than it saves"


if __name__ == "__main__":
    interpret(Path(sys.argv[1]))
