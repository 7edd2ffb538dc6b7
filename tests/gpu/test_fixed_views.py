# SPDX-License-Identifier: Apache-2.0
"""Fixed views on a GPU: tokens kept there, on the host or nowhere give the features of the CPU."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from support.tiny import write_tiny_vit

from onea.data.image_storage import PackedImages
from onea.data.transforms import Preprocess
from onea.learner import fixed_views
from onea.learner.fixed_views import FixedViews
from onea.runtime import make_runtime
from onea.vit.adapter import Adapters
from onea.vit.backbones import load_backbone

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
PIXELS = np.random.default_rng(1).integers(0, 256, (20, 3, 32, 32), dtype=np.uint8)
ROWS = torch.tensor([3, 19, 0, 7, 11])


@pytest.fixture(scope="module")
def backbone(tmp_path_factory):
    path = tmp_path_factory.mktemp("vit") / "tiny.safetensors"
    write_tiny_vit(path)
    return str(path)


def looked_at(backbone: str, device: str) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Features of a view when it is new and when it is kept, and tokens of a training batch."""
    runtime = make_runtime(device, "fp32", 1)
    vit = load_backbone(backbone).to(runtime.device)
    images = PackedImages(PIXELS, Preprocess(vit.size, vit.mean, vit.std), runtime.device, "device")
    adapters = Adapters(vit.depth, vit.width, 4, generator=torch.Generator().manual_seed(1), first_block=1)
    hooks = adapters.eval().to(runtime.device)
    crops = [images.sample_crops(len(ROWS), 0.3, torch.Generator().manual_seed(2))]
    views = FixedViews(vit, runtime, images, ROWS, crops, 0.3, hooks)
    first, again = views.features(1, hooks), views.features(1, hooks)
    return first.cpu(), again.cpu(), views.tokens(torch.tensor([4, 0, 4]), torch.tensor([1, 0, 0])).cpu()


@pytest.mark.parametrize("place", ["device", "host", "nowhere"])
def test_features_and_tokens_are_the_cpus(backbone, place, monkeypatch):
    expected = looked_at(backbone, "cpu")
    places = {"device": torch.device("cuda"), "host": torch.device("cpu"), "nowhere": None}
    monkeypatch.setattr(fixed_views, "_cache_device", lambda *_: places[place])
    for mine, theirs in zip(looked_at(backbone, "cuda"), expected, strict=True):
        # Half precision has 11 bits; tokens that are kept nowhere are not in it.
        torch.testing.assert_close(mine, theirs, rtol=5e-3, atol=5e-3, check_dtype=False)
