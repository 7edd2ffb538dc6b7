# SPDX-License-Identifier: Apache-2.0
"""Counters of the service as Prometheus reads them."""

from __future__ import annotations

from prometheus_client import CONTENT_TYPE_LATEST as CONTENT_TYPE
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

__all__ = ["CONTENT_TYPE", "Metrics"]


class Metrics:
    """Counters and distributions of one service; any thread may add to them."""

    def __init__(self) -> None:
        # One of its own: the library's default one is shared by all services of a process.
        self._registry = one = CollectorRegistry()
        self.requests = Counter("onea_requests", "Requests answered.", ["route", "status"], registry=one)
        self.request_seconds = Histogram(
            "onea_request_seconds", "From the request's head to the end of its answer.", ["route"], registry=one
        )
        self.images = Counter("onea_images", "Images answered.", registry=one)
        self.unknown = Counter("onea_unknown", "Images answered 'unknown'.", registry=one)
        self.jobs = Counter("onea_lessons", "Training jobs begun.", registry=one)
        self.batch_images = Histogram(
            "onea_batch_images",
            "Images in one pass through the network.",
            buckets=(1, 2, 4, 8, 16, 32, 64),
            registry=one,
        )
        self.model_version = Gauge("onea_model_version", "Version of the model that answers.", registry=one)
        self.model_classes = Gauge("onea_model_classes", "Classes it knows.", registry=one)
        self.learning = Gauge("onea_learning", "1 while it is being taught.", registry=one)

    def text(self) -> bytes:
        """Everything in the text format of Prometheus."""
        return generate_latest(self._registry)
