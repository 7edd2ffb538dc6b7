# SPDX-License-Identifier: Apache-2.0
"""The limits and settings of a service."""

from __future__ import annotations

from dataclasses import dataclass, field

from onea.data.pixel_limit import MEGAPIXEL, MOST_PIXELS
from onea.errors import OneaError

MEGABYTE = 1_000_000
LOOPBACK = ("localhost", "127.0.0.1", "[::1]")


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
        pixels: of one image; what several images may have follows from it.
        requests: that are worked on at the same time.
        client_requests: that are worked on at the same time for one client, which is one address.
        uploads: requests that are being received at the same time; one more, and the slowest gives way.
        connections: that are open; one more, and the oldest on which no request is under way is closed.
        head_bytes: of the first line and the headers of a request.
        head_seconds: in which they must have come.
        patience: seconds that a client may pause in the middle of its request.
        rate: bytes a second that a client must send on average, besides ``patience`` seconds in all.
    """

    predict_bytes: int = 64 * MEGABYTE
    learn_bytes: int = 512 * MEGABYTE
    predict_images: int = 64
    learn_files: int = 200
    zip_entries: int = 10_000
    zip_bytes: int = 2_000 * MEGABYTE
    zip_ratio: int = 200
    pixels: int = 50 * MEGAPIXEL
    requests: int = 128
    client_requests: int = 96
    uploads: int = 128
    connections: int = 512
    head_bytes: int = 16_384
    head_seconds: float = 10.0
    patience: float = 30.0
    rate: int = 10_000

    @property
    def predict_pixels(self) -> int:
        """Of all images in one request to predict: by default enough for 64 photos of 12 megapixels."""
        return 16 * self.pixels

    @property
    def learn_pixels(self) -> int:
        """Of all images in one request to learn."""
        return 200 * self.pixels

    @property
    def waiting_pixels(self) -> int:
        """Of all images that one client waits for; one request more, and its largest is refused."""
        return 2 * self.predict_pixels

    @property
    def decoded_pixels(self) -> int:
        """Of all images that are decoded at the same time, which bounds the memory that takes."""
        return 4 * self.pixels

    @property
    def large_pixels(self) -> int:
        """Of an image from which on it may not take the last thread that decodes."""
        return self.pixels // 4


@dataclass(frozen=True)
class Settings:
    """How a service behaves.

    Attributes:
        token: who knows it may teach and undo; None: nobody may.
        batch: the most images of different requests in one pass; 1 switches batching off.
        wait: seconds that the first image of a pass waits for others.
        grace: seconds that requests and the current training job have to finish when the service is stopped.
        follow: seconds between two looks for changes that others made to the model folder; 0: never.
        prediction_only: whether teaching is not offered at all, whatever the token.
        hosts: names that requests may ask for in their ``Host``, without a port; ``*`` is any name.
        addresses: whether they may ask for any IP address instead of a name.
    """

    token: str | None = None
    limits: Limits = field(default_factory=Limits)
    batch: int = 32
    wait: float = 0.002
    grace: float = 10.0
    follow: float = 2.0
    prediction_only: bool = False
    hosts: tuple[str, ...] = LOOPBACK
    addresses: bool = False


def check_settings(settings: Settings) -> Settings:
    """Refuse values that mean nothing."""
    day = 86_400
    for name, value, least, most, unit in (
        ("--batch", settings.batch, 1, 10_000, ""),
        ("--wait", 1000 * settings.wait, 0, 60_000, " milliseconds"),
        ("--grace", settings.grace, 0, day, " seconds"),
        ("--max-upload", settings.limits.learn_bytes // MEGABYTE, 1, 1_000_000, " megabytes"),
        ("--max-megapixels", settings.limits.pixels // MEGAPIXEL, 1, MOST_PIXELS // MEGAPIXEL, " megapixels"),
    ):
        if not least <= value <= most:  # which is false for nan, too
            raise OneaError(f"{name} must be between {least:,} and {most:,}{unit}.")
    return settings
