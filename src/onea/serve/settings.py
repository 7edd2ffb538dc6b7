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
        predict_bytes: maximum size of a prediction request.
        learn_bytes: maximum size of a teaching request.
        predict_images: maximum number of images in a prediction request.
        learn_files: maximum number of images in the form of a teaching request; each may need an open file.
        zip_entries: maximum number of files in a zip.
        zip_bytes: maximum uncompressed size of a zip.
        zip_ratio: maximum compression ratio of a file in a zip.
        pixels: maximum number of pixels of an image; the limits on several images are multiples of it.
        requests: maximum number of requests that are processed at the same time.
        client_requests: the same for one client, identified by its IP address.
        uploads: maximum number of requests that are received at the same time; one more ends the slowest.
        connections: maximum number of open connections; one more closes the one that has been idle the longest.
        head_bytes: maximum size of the request line and the headers.
        head_seconds: time limit for receiving them.
        pause_seconds: maximum pause while a client sends a request.
        min_rate: minimum average rate in bytes per second, after ``pause_seconds``.
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
        """Maximum for all images of a prediction request: by default enough for 64 photos of 12 megapixels."""
        return 16 * self.pixels

    @property
    def learn_pixels(self) -> int:
        """Maximum for all images of a teaching request."""
        return 200 * self.pixels

    @property
    def waiting_pixels(self) -> int:
        """Maximum for the waiting images of one client; above it, the largest of its requests is refused."""
        return 2 * self.predict_pixels

    @property
    def decoded_pixels(self) -> int:
        """Maximum for all images that are decoded at the same time, which bounds the memory."""
        return 4 * self.pixels

    @property
    def large_pixels(self) -> int:
        """Above this, an image may not occupy the last decoding thread."""
        return self.pixels // 4


@dataclass(frozen=True)
class Settings:
    """Settings of a service.

    Attributes:
        token: clients that send it may teach and undo; without a token teaching is disabled.
        limits: limits of requests.
        batch_size: maximum number of images in a forward pass, across requests; 1 disables batching.
        batch_wait: seconds that the first request of a batch waits for others.
        grace: seconds allowed to finish requests and the training job when the service is stopped.
        poll_seconds: seconds between checks of the model folder for changes by other processes; 0 disables them.
        idle_training: seconds without a change after which a training that is due begins, on stored copies of photos;
            updates then train nothing. 0 trains within updates.
        prediction_only: whether teaching is disabled even with the token.
        hosts: allowed names in the ``Host`` header, without a port; ``*`` allows any name.
        any_ip: whether the ``Host`` header may be any IP address.
    """

    token: str | None = None
    limits: Limits = field(default_factory=Limits)
    batch_size: int = 32
    batch_wait: float = 0.002
    grace: float = 10.0
    poll_seconds: float = 2.0
    idle_training: float = 0.0
    prediction_only: bool = False
    hosts: tuple[str, ...] = LOOPBACK
    any_ip: bool = False


def check_settings(settings: Settings) -> Settings:
    """Refuse values out of range."""
    for option, value, low, high, unit in (
        ("--batch-size", settings.batch_size, 1, 10_000, ""),
        ("--batch-wait", 1000 * settings.batch_wait, 0, 60_000, " milliseconds"),
        ("--grace", settings.grace, 0, 86_400, " seconds"),
        ("--idle-training", settings.idle_training, 0, 86_400, " seconds"),
        ("--max-upload", settings.limits.learn_bytes // MEGABYTE, 1, 1_000_000, " megabytes"),
        ("--max-megapixels", settings.limits.pixels // MEGAPIXEL, 1, MAX_PIXEL_LIMIT // MEGAPIXEL, " megapixels"),
    ):
        if not low <= value <= high:  # which is false for nan, too
            raise OneaError(f"{option} must be between {low:,} and {high:,}{unit}.")
    return settings
