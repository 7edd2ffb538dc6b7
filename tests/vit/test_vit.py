# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import socket
from collections import Counter
from pathlib import Path

import pytest
import timm
import torch
from safetensors.torch import load_file
from support.tiny import save_plain
from timm.layers import resample_abs_pos_embed
from torch.utils._python_dispatch import TorchDispatchMode

from onea import seeds
from onea.errors import OneaError
from onea.vit.adapter import Adapters
from onea.vit.backbones import digest_of, load_backbone
from onea.vit.frozen import FrozenViT
from onea.vit.heads import CosineHead, LinearHead, class_means
from onea.vit.network_config import BUNDLED, NetworkConfig, bundled_file
from onea.vit.weight_files import dequantise

ARCHITECTURES = [
    ("vit_tiny_patch16_224", {}),
    ("vit_tiny_patch16_224", {"class_token": False, "global_pool": "avg"}),
    ("vit_small_patch14_dinov2", {}),  # layer scale
    ("vit_small_patch14_reg4_dinov2", {}),  # register tokens, position embeddings only for patches
]


def small(name: str, **extra) -> torch.nn.Module:
    size = 28 if "patch14" in name else 32
    return timm.create_model(name, img_size=size, embed_dim=128, num_heads=2, depth=2, num_classes=0, **extra).eval()


def adapters(vit: FrozenViT, rank: int = 8, **switches) -> Adapters:
    return Adapters(vit.depth, vit.width, rank, generator=torch.Generator().manual_seed(0), **switches)


@pytest.fixture(scope="module")
def bundled() -> FrozenViT:
    return load_backbone(image_size=56)


@pytest.mark.parametrize(("name", "extra"), ARCHITECTURES)
def test_features_of_a_file_equal_timms(name, extra, tmp_path):
    model = small(name, **extra)
    path = tmp_path / "model.safetensors"
    save_plain(model.state_dict(), path)
    loaded = load_backbone(str(path))
    images = torch.randn(2, 3, loaded.size, loaded.size, generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        expected = model.forward_head(model.forward_features(images), pre_logits=True)
        torch.testing.assert_close(loaded(images), expected)
    assert loaded.digest == digest_of(load_file(path))


@pytest.mark.parametrize(("size", "patch"), [(32, 16), (30, 14), ((28, 42), 14)])
def test_patches_equal_timms_convolution(size, patch):
    """Also if the image size is not a multiple of the patch size: the remaining pixels are ignored."""
    model = timm.create_model("vit_tiny_patch16_224", img_size=size, patch_size=patch, embed_dim=96, depth=1).eval()
    frozen = FrozenViT(model, "", "", NetworkConfig())
    images = torch.randn(2, 3, *model.patch_embed.img_size, generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        torch.testing.assert_close(frozen.embed(images), model._pos_embed(model.patch_embed(images)))
    high, wide = (side // patch * patch - patch for side in model.patch_embed.img_size)
    with pytest.raises(AssertionError, match="doesn't match model"):
        frozen.embed(images[:, :, :high, :wide])
    if images.shape[2] % patch:  # the same number of patches, but not the network's image size
        with pytest.raises(AssertionError, match="doesn't match model"):
            frozen.embed(images[:, :, :-2, :-2])


def test_images_of_another_size_are_refused(bundled):
    with pytest.raises(AssertionError, match="doesn't match model"):
        bundled(torch.zeros(1, 3, 98, 98))


def test_the_bundled_backbone(bundled):
    assert (bundled.size, bundled.depth, bundled.width) == (56, 12, 384)
    assert not any(parameter.requires_grad for parameter in bundled.parameters())
    assert not bundled.train().training
    assert bundled.name == "vit_small_patch14_dinov2"


@pytest.mark.parametrize("size", range(56, 519, 14))
def test_every_multiple_of_the_patch_size_is_an_image_size(size):
    vit = load_backbone(BUNDLED, size, depth=1)
    side = size // 14
    assert (vit.size, vit.tokens) == (size, 1 + side**2)
    stored = dequantise(load_file(bundled_file()))["pos_embed"]
    torch.testing.assert_close(vit.vit.pos_embed, resample_abs_pos_embed(stored, [side, side]))
    assert vit(torch.linspace(-1, 1, size).expand(1, 3, size, size)).isfinite().all()


def test_the_adapter_is_parallel_to_the_mlp(bundled):
    """Against an independent forward pass written with hooks on timm's own blocks."""
    module = adapters(bundled).eval()
    with torch.no_grad():
        for adapter in module.blocks:
            adapter.up.weight.normal_(std=0.5, generator=torch.Generator().manual_seed(3))
            adapter.up.bias.fill_(0.1)
    images = torch.randn(2, 3, 56, 56, generator=torch.Generator().manual_seed(2))
    streams: dict[int, torch.Tensor] = {}
    hooks = []
    for index, block in enumerate(bundled.vit.blocks):
        hooks.append(block.norm2.register_forward_pre_hook(lambda _, x, i=index: streams.__setitem__(i, x[0])))
        hooks.append(
            block.register_forward_hook(
                lambda _, __, out, i=index, a=module.blocks[index]: (
                    out + 0.1 * (torch.relu(streams[i] @ a.down.weight.T + a.down.bias) @ a.up.weight.T + a.up.bias)
                )
            )
        )
    with torch.no_grad():
        expected = bundled.vit.forward_head(bundled.vit.forward_features(images), pre_logits=True)
    for hook in hooks:
        hook.remove()
    with torch.no_grad():
        torch.testing.assert_close(bundled(images, module), expected, rtol=1e-4, atol=1e-4)
        assert not torch.allclose(bundled(images), expected, atol=1e-2)


def test_a_fresh_adapter_changes_nothing(bundled):
    images = torch.randn(1, 3, 56, 56)
    with torch.no_grad():
        assert torch.equal(bundled(images, adapters(bundled)), bundled(images))


@pytest.mark.parametrize(("rank", "parameters"), [(128, 2_370_048), (64, 1_189_632), (16, 304_320)])
def test_adapter_size_on_vit_b(rank, parameters):
    module = Adapters(12, 768, rank, generator=torch.Generator())
    assert sum(value.numel() for value in module.parameters()) == parameters


def test_initial_adapter_and_dropout():
    module = Adapters(2, 100, 30, generator=torch.Generator().manual_seed(1))
    down = module.blocks[0].down.weight
    assert down.abs().max() <= 0.1
    assert float(down.detach().std()) == pytest.approx(0.1 / 3**0.5, rel=0.05)
    assert not torch.equal(down, module.blocks[1].down.weight)
    with torch.no_grad():
        module.blocks[0].up.weight.fill_(1.0)
    tokens = torch.ones(1, 5, 100)
    assert torch.equal(module.eval().mlp_update(0, tokens), module.mlp_update(0, tokens))
    module.train()
    assert not torch.equal(module.mlp_update(0, tokens), module.mlp_update(0, tokens))


def test_cast_matrices_do_not_change_autocast_results(tiny_vit):
    images = torch.randn(4, 3, 28, 28, generator=torch.Generator().manual_seed(5))
    with torch.no_grad(), torch.autocast("cpu", dtype=torch.bfloat16):
        plain = load_backbone(tiny_vit)(images)
        stored = load_backbone(tiny_vit).cast_matrices(torch.bfloat16)(images)
    assert torch.equal(plain, stored)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_frozen_adapter_is_converted_once(tiny_vit, dtype):
    vit = load_backbone(tiny_vit).cast_matrices(dtype)
    module, images = adapters(vit), torch.randn(2, 3, vit.size, vit.size, generator=torch.Generator().manual_seed(1))
    drawn = torch.Generator().manual_seed(2)
    weights = {name: 0.3 * torch.randn(each.shape, generator=drawn) for name, each in module.state_dict().items()}

    def passed() -> tuple[torch.Tensor, int]:
        with torch.no_grad(), torch.autocast("cpu", torch.bfloat16, enabled=dtype != torch.float32), Calls() as calls:
            return vit(images, module), calls.found["aten._to_copy.default"]

    frozen = module.eval().requires_grad_(False)
    before = passed()[0]
    frozen.load_state_dict(weights)
    found = passed()[0]
    assert not torch.allclose(found, before), "the new weights are used"
    conversions = passed()[1]
    heard: list[object] = []
    handle = module.blocks[1].down.register_forward_hook(lambda *given: heard.append(given))
    by_layers, more = passed()  # layer by layer, because of the forward hook
    handle.remove()
    assert heard
    torch.testing.assert_close(found, by_layers, rtol=0, atol=0)
    assert more - conversions == (0 if dtype == torch.float32 else 4 * vit.depth)
    module.requires_grad_(True)
    with torch.autocast("cpu", torch.bfloat16, enabled=dtype != torch.float32):
        vit(images, module).sum().backward()
    assert all(each.grad is not None for each in module.parameters())


class Calls(TorchDispatchMode):
    """Counts the operations of PyTorch by name."""

    def __init__(self) -> None:
        super().__init__()
        self.found: Counter[str] = Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.found[str(func)] += 1
        return func(*args, **(kwargs or {}))


def test_initial_heads_and_bounds_of_cosine_logits():
    linear, cosine = (kind(50, 4, seeds.generator(1, 2, "head")) for kind in (LinearHead, CosineHead))
    assert torch.equal(linear.weight, cosine.weight)
    assert cosine(100 * torch.randn(8, 50)).abs().max() <= 1 + 1e-6


def test_class_means_are_not_normalised():
    features, labels = torch.randn(40, 6), torch.randint(3, 7, (40,))
    labels[:4] = torch.arange(3, 7)
    means = class_means(features, labels, range(3, 7))
    for position in range(3, 7):
        torch.testing.assert_close(means[position - 3], features[labels == position].mean(0))


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("missing.safetensors", "does not exist"),
        ("vit_base_patch16_224", "needs the tag"),
        ("vit_small_patch14_dinov3", "did you mean 'vit_small_patch14_dinov2'"),
        ("resnet50.a1_in2k", "did you mean 'resnet50.a1_in1k'"),
        ("test_vit2", "needs the tag"),
        ("vit_base_patch16_18x2_224", "timm has no weights for"),
        ("nonsense:tiny.safetensors", "does not exist"),
    ],
)
def test_unknown_names_are_refused(name, words):
    with pytest.raises(OneaError, match=words) as caught:
        load_backbone(name)
    assert "\n" not in str(caught.value)


def test_files_without_a_plain_vit_are_refused(tmp_path, tiny_vit):
    truncated = tmp_path / "cut.safetensors"
    truncated.write_bytes(Path(tiny_vit).read_bytes()[:5000])
    with pytest.raises(OneaError, match="damaged"):
        load_backbone(str(truncated))
    foreign = tmp_path / "foreign.safetensors"
    save_plain({"weight": torch.ones(2)}, foreign)
    with pytest.raises(OneaError, match="does not contain a plain timm ViT"):
        load_backbone(str(foreign))


def test_a_timm_name_without_internet_is_refused(monkeypatch, tmp_path):
    def unreachable(*_, **__):
        raise socket.gaierror("no network")

    monkeypatch.setattr(socket, "getaddrinfo", unreachable)
    with pytest.raises(OneaError, match=r"could not be downloaded.*backbone="):
        load_backbone("vit_tiny_patch16_224.augreg_in21k")


def test_an_unsupported_architecture_is_refused():
    model = timm.create_model("vit_relpos_small_patch16_224", num_classes=0)
    with pytest.raises(OneaError, match="not a plain vision transformer"):
        FrozenViT(model, "relpos", "", NetworkConfig())


def test_downloaded_weights_that_have_changed_are_refused(monkeypatch, tmp_path):
    """The digest of the first download is stored; only timm and its download are replaced."""
    name = "vit_tiny_patch16_224.augreg_in21k"
    real = timm.create_model

    def download(seed: int):
        def create(*arguments, **options):
            with torch.random.fork_rng():
                torch.manual_seed(seed)
                return real("vit_tiny_patch16_224", pretrained=False, num_classes=0, depth=1)

        return create

    monkeypatch.setenv("ONEA_CACHE", str(tmp_path))
    monkeypatch.setattr("onea.vit.weight_files._download_overlay", lambda name: {})
    monkeypatch.setattr(timm, "create_model", download(1))
    first = load_backbone(name).digest
    assert load_backbone(name).digest == first
    monkeypatch.setattr(timm, "create_model", download(2))
    both = rf".sha256 [0-9a-f]{{12}}….* differ from those when they were first used here .{first[:12]}…"
    with pytest.raises(OneaError, match=both) as caught:
        load_backbone(name)
    note = tmp_path / "backbones" / f"{name}.json"
    assert str(note) in str(caught.value)
    note.unlink()
    assert load_backbone(name).digest != first
    note.write_text("[]")
    with pytest.raises(OneaError, match="differ from those"):
        load_backbone(name)


def test_a_file_that_declares_a_billion_blocks_is_refused_at_once(tmp_path, tiny_vit):
    tensors = load_file(tiny_vit)
    save_plain(tensors | {"blocks.999999999.norm1.weight": torch.ones(64)}, tmp_path / "deep.safetensors")
    with pytest.raises(OneaError, match="1000000000 blocks"):
        load_backbone(str(tmp_path / "deep.safetensors"))
