"""What a service allows and how it behaves; every limit in one place."""

from __future__ import annotations

from dataclasses import dataclass, field

from onea.errors import OneaError

MEGABYTE = 1_000_000


@dataclass(frozen=True)
class Limits:
    """What a request may ask for; beyond, it is refused before it costs much.

    Attributes:
        predict_bytes: size of a request to predict.
        learn_bytes: size of a request to learn.
        predict_images: images in one request to predict.
        learn_files: images in one request to learn that is not a zip; each may hold a file open.
        zip_entries: files in a zip.
        zip_bytes: of everything in a zip, unpacked.
        zip_ratio: how much larger than its packed form a file in a zip may be.
        pixels: of one image.
        requests: that are worked on at the same time.
        patience: seconds that a client may pause in the middle of its request.
        top: the most answers about one image.
    """

    predict_bytes: int = 64 * MEGABYTE
    learn_bytes: int = 512 * MEGABYTE
    predict_images: int = 64
    learn_files: int = 200
    zip_entries: int = 10_000
    zip_bytes: int = 2_000 * MEGABYTE
    zip_ratio: int = 200
    pixels: int = 50_000_000
    requests: int = 128
    patience: float = 30.0
    top: int = 100


@dataclass(frozen=True)
class Settings:
    """How a service behaves.

    Attributes:
        token: who knows it may teach and undo; None: nobody may.
        batch: the most images of different requests in one pass; 1 switches batching off.
        wait: seconds that the first image of a pass waits for others.
        grace: seconds that a running lesson has to finish when the service is stopped.
        follow: seconds between two looks for changes that others made to the model folder; 0: never.
        prediction_only: whether teaching is not offered at all, whatever the token.
    """

    token: str | None = None
    limits: Limits = field(default_factory=Limits)
    batch: int = 32
    wait: float = 0.002
    grace: float = 10.0
    follow: float = 2.0
    prediction_only: bool = False


def check_settings(settings: Settings) -> Settings:
    """Refuse values that mean nothing."""
    for name, value, least in (
        ("--batch", settings.batch, 1),
        ("--wait", settings.wait, 0),
        ("--grace", settings.grace, 0),
        ("--max-upload", settings.limits.learn_bytes, 1),
        ("--max-megapixels", settings.limits.pixels, 1),
    ):
        if not value >= least:
            raise OneaError(f"{name} is too small; it must be at least {least}.")
    return settings
