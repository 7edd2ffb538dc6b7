# SPDX-License-Identifier: Apache-2.0
"""The configuration of a network, which its tensors do not contain, and the network bundled with onea.

A configuration is stored as timm's ``config.json``: ``architecture``, ``model_args`` and ``pretrained_cfg``. It has the
number of heads, activation, pooling, preprocessing and licence. This module does not import torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from importlib import resources
from pathlib import Path
from typing import Any

from onea.errors import OneaError

BUNDLED = "vit_small_patch14_dinov2"
"""The bundled network: DINOv2 ViT-S/14, 12 blocks, positions for 37 x 37 patches."""
BUNDLED_SHA256 = "53242f3481e9cf43fdb6b50f05e68c78e3ccc6d393a4dd3137a331499e7795f6"
"""The sha256 of its tensors as stored."""
BUNDLED_LICENCE = "apache-2.0"
# The sides of its images in pixels: the default, and that of the preset ``accurate`` (docs/models.md).
IMAGE_SIZE, ACCURATE_IMAGE_SIZE = 168, 224


def bundled_file() -> Path:
    """The file of the bundled network."""
    with resources.as_file(resources.files("onea") / "assets" / f"{BUNDLED}.safetensors") as path:
        return path


IMAGENET_MEAN = (0.485, 0.456, 0.406)
IMAGENET_STD = (0.229, 0.224, 0.225)
PLAIN = "plain"
"""The architecture of a ViT that is inferred from its tensors: heads 64 wide and GELU, unless in ``model_args``."""
MAX_IMAGE_SIZE = 4096  # pixels; position embeddings of larger images would take gigabytes before another error occurs
# Parameters of timm's create_model that are not arguments of a network; some of them read other files.
_IGNORED_ARGS = (
    *("pretrained", "pretrained_cfg", "pretrained_cfg_overlay", "pretrained_strict", "checkpoint_path", "cache_dir"),
    *("scriptable", "exportable", "no_jit", "features_only", "out_indices", "device", "dtype", "num_classes"),
)
_TRANSFORMERS = ("vision_transformer", "vision_transformer_hybrid", "deit", "eva")  # timm's modules


def check_image_size(size: object) -> None:
    """Refuse an image size that is not a positive integer, or is too large."""
    if isinstance(size, bool) or not isinstance(size, int) or not 1 <= size <= MAX_IMAGE_SIZE:
        raise OneaError(f"image_size is {size!r}; give the side in pixels, a whole number up to {MAX_IMAGE_SIZE:,}.")


@dataclass(frozen=True)
class NetworkConfig:
    """The architecture of a network, and the preprocessing that its weights were trained with.

    Attributes:
        architecture: timm's name without a tag, or ``plain``.
        model_args: arguments that differ from those of the architecture.
        mean: pixel mean.
        std: pixel standard deviation.
        input_size: side of the images in pixels; 0 is that of the architecture.
        interpolation: for resizing.
        crop_pct: side of the crop as a share of the side of the resized image.
        crop_mode: ``center`` (the short side is resized, the centre cropped), ``squash`` (stretched to a square), or
            ``border``.
        licence: licence of the weights, in the notation of the Hugging Face Hub; empty if unknown.
    """

    architecture: str = PLAIN
    model_args: Mapping[str, Any] = field(default_factory=dict)
    mean: tuple[float, float, float] = IMAGENET_MEAN
    std: tuple[float, float, float] = IMAGENET_STD
    input_size: int = 0
    interpolation: str = "bilinear"
    crop_pct: float = 1.0
    crop_mode: str = "center"
    licence: str = ""

    @classmethod
    def from_timm(cls, name: str) -> NetworkConfig:
        """The configuration of timm's ``architecture.tag``, or of an architecture with its default weights."""
        from timm.models import get_pretrained_cfg

        pretrained = get_pretrained_cfg(name)
        return cls._from_parts(name.split(".")[0], {}, pretrained.to_dict() if pretrained else {})

    @classmethod
    def from_json(cls, value: Any) -> NetworkConfig:
        """The configuration in the format of timm's ``config.json``.

        Raises:
            ValueError: the value has another format.
        """
        if not isinstance(value, dict) or not isinstance(value.get("architecture"), str):
            raise ValueError("it has no architecture")
        args, pretrained = value.get("model_args") or {}, value.get("pretrained_cfg") or {}
        if not isinstance(args, dict) or not isinstance(pretrained, dict):
            raise ValueError("model_args and pretrained_cfg must be JSON objects")
        architecture = value["architecture"].split(".")[0]
        if architecture != PLAIN:
            import timm

            if not timm.is_model(architecture):
                raise ValueError(f"timm has no architecture '{architecture}'")
        if "mean" not in pretrained or "std" not in pretrained:
            raise ValueError("pretrained_cfg has no mean and std for the normalisation of images")
        args = {name: arg for name, arg in args.items() if name not in _IGNORED_ARGS}
        return cls._from_parts(architecture, args, pretrained)

    @classmethod
    def _from_parts(cls, architecture: str, args: dict[str, Any], pretrained: Mapping[str, Any]) -> NetworkConfig:
        mean, std = (
            tuple(float(number) for number in pretrained.get(name, default))
            for name, default in (("mean", IMAGENET_MEAN), ("std", IMAGENET_STD))
        )
        if len(mean) != 3 or len(std) != 3 or not all(number > 0 for number in std):
            raise ValueError("mean and std are not three numbers each")
        if not float(pretrained.get("crop_pct") or 1.0) > 0:
            raise ValueError(f"crop_pct is {pretrained['crop_pct']}")
        side = pretrained.get("input_size") or (3, 0, 0)
        if len(side) != 3 or side[0] != 3 or side[1] != side[2]:
            raise ValueError(f"its input size is {side}, not that of a square RGB image")
        size = args.get("img_size") or 0
        for pixels in (side[1], *(size if isinstance(size, list | tuple) else [size])):
            if not 0 <= pixels <= MAX_IMAGE_SIZE:
                raise ValueError(f"its input is {pixels} pixels wide")
        return cls(
            architecture=architecture,
            model_args=args,
            mean=(mean[0], mean[1], mean[2]),
            std=(std[0], std[1], std[2]),
            input_size=int(side[1]),
            interpolation=str(pretrained.get("interpolation") or "bilinear"),
            crop_pct=float(pretrained.get("crop_pct") or 1.0),
            crop_mode=str(pretrained.get("crop_mode") or "center"),
            licence=str(pretrained.get("license") or ""),
        )

    def to_json(self) -> dict[str, Any]:
        """In the format of timm's ``config.json``."""
        pretrained: dict[str, Any] = {
            "mean": list(self.mean),
            "std": list(self.std),
            "interpolation": self.interpolation,
            "crop_pct": self.crop_pct,
            "crop_mode": self.crop_mode,
        }
        if self.input_size:
            pretrained["input_size"] = [3, self.input_size, self.input_size]
        if self.licence:
            pretrained["license"] = self.licence
        return {"architecture": self.architecture, "model_args": dict(self.model_args), "pretrained_cfg": pretrained}

    def build_args(self) -> dict[str, Any]:
        """Arguments of timm's ``create_model`` for a network without a classification head."""
        from timm.models import get_pretrained_cfg, is_model_in_modules

        args: dict[str, Any] = {"num_classes": 0, **self.model_args}
        known = get_pretrained_cfg(self.architecture)
        transformer = is_model_in_modules(self.architecture, _TRANSFORMERS)
        if self.input_size and (transformer or (known is not None and known.fixed_input_size)):
            args.setdefault("img_size", self.input_size)
        if transformer:
            args["dynamic_img_size"] = False  # all images have one size, for which positions are computed once
        return args


_PERMISSIVE = ("apache-2.0", "mit", "bsd-3-clause", "cc-by-4.0")
_TERMS = {
    "dinov3-license": (
        "If you redistribute the weights or models made with them, include DINOv3's licence, name DINOv3, and allow "
        "only the uses that the licence allows (ai.meta.com/resources/models-and-libraries/dinov3-license)."
    ),
    "cc-by-nc-4.0": "Commercial use is not allowed (creativecommons.org/licenses/by-nc/4.0).",
    "fair-noncommercial-research-license": "Only non-commercial research is allowed.",
}
_READ_TERMS = "Read its terms before you redistribute the weights or models made with them."


def licence_terms(licence: str) -> str:
    """Terms for redistributing weights, or models made with them; empty if naming the licence is enough.

    >>> licence_terms("apache-2.0")
    ''
    >>> licence_terms("apple-ascl")
    'Read its terms before you redistribute the weights or models made with them.'
    """
    if licence in _PERMISSIVE:
        return ""
    if not licence or licence == "unknown":
        return "Ask the authors before you redistribute the weights or models made with them."
    return _TERMS.get(licence, _READ_TERMS)


def licence_notice(licence: str) -> str:
    """A sentence or two about the licence of weights and its terms.

    >>> licence_notice("mit")
    'Its weights are licensed under mit.'
    """
    known = licence and licence != "unknown"
    name = f"Its weights are licensed under {licence}." if known else "The licence of its weights is unknown."
    return f"{name} {licence_terms(licence)}".strip()
