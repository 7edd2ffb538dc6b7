# SPDX-License-Identifier: Apache-2.0
"""The limits and settings of a service."""

from __future__ import annotations

from dataclasses import dataclass, field

from onea.data.pixel_limit import MAX_PIXEL_LIMIT, MEGAPIXEL
from onea.errors import OneaError

MEGABYTE = 1_000_000
LOOPBACK = ("localhost", "127.0.0.1", "[::1]")


@dataclass(frozen=True)
class Limits:
    """Limits of requests, checked before a request costs much.

    Attributes:
        predict_bytes: size of a request to predict.
        learn_bytes: size of a request to learn.
        predict_images: images in one request to predict.
        learn_files: images in one form to learn; each may hold a file open.
        zip_entries: files in a zip.
        zip_bytes: uncompressed size of a zip.
        zip_ratio: compression ratio of a file in a zip.
        pixels: of one image; the limits of several images are multiples of it.
        requests: being processed at the same time.
        client_requests: being processed at the same time for one client, which is one IP address.
        uploads: requests being received at the same time; for one more, the slowest is ended.
        connections: open connections; for one more, the one that is idle for the longest time is closed.
        head_bytes: size of the first line and the headers of a request.
        head_seconds: time in which these must arrive.
        pause_seconds: time that a client may pause while it sends a request.
        min_rate: average bytes per second that a client must send, after ``pause_seconds``.
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
    pause_seconds: float = 30.0
    min_rate: int = 10_000

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
        """Of all images of one client that wait; beyond, the largest of its requests is refused."""
        return 2 * self.predict_pixels

    @property
    def decoded_pixels(self) -> int:
        """Of all images being decoded at the same time, which bounds the memory."""
        return 4 * self.pixels

    @property
    def large_pixels(self) -> int:
        """Of an image that may not occupy the last decoding thread."""
        return self.pixels // 4


@dataclass(frozen=True)
class Settings:
    """Settings of a service.

    Attributes:
        token: clients that send it may teach and undo; without a token teaching is disabled.
        limits: limits of requests.
        batch_size: largest number of images of different requests in one forward pass; 1 disables batching.
        batch_wait: seconds that the first request of a batch waits for others.
        grace: seconds to finish requests and the training job when the service is stopped.
        follow: seconds between checks of the model folder for changes by other processes; 0 disables them.
        prediction_only: whether teaching is disabled even with the token.
        hosts: allowed names in the ``Host`` header, without a port; ``*`` allows any name.
        any_ip: whether any IP address is allowed there.
    """

    token: str | None = None
    limits: Limits = field(default_factory=Limits)
    batch_size: int = 32
    batch_wait: float = 0.002
    grace: float = 10.0
    follow: float = 2.0
    prediction_only: bool = False
    hosts: tuple[str, ...] = LOOPBACK
    any_ip: bool = False


def check_settings(settings: Settings) -> Settings:
    """Refuse values out of range."""
    for option, value, low, high, unit in (
        ("--batch-size", settings.batch_size, 1, 10_000, ""),
        ("--batch-wait", 1000 * settings.batch_wait, 0, 60_000, " milliseconds"),
        ("--grace", settings.grace, 0, 86_400, " seconds"),
        ("--max-upload", settings.limits.learn_bytes // MEGABYTE, 1, 1_000_000, " megabytes"),
        ("--max-megapixels", settings.limits.pixels // MEGAPIXEL, 1, MAX_PIXEL_LIMIT // MEGAPIXEL, " megapixels"),
    ):
        if not low <= value <= high:  # which is false for nan, too
            raise OneaError(f"{option} must be between {low:,} and {high:,}{unit}.")
    return settings
