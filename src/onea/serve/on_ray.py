# SPDX-License-Identifier: Apache-2.0
"""The same app on a Ray cluster: several processes that answer, on one machine or many. Prediction only."""

from __future__ import annotations

import dataclasses
import logging
import signal
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from onea.distributed import import_ray, ray_cluster
from onea.errors import OneaError, import_extra
from onea.model.storage.folder import read_manifest
from onea.serve.settings import Settings

APP = "onea"


def run_on_ray(
    path: Path,
    settings: Settings,
    machine: Mapping[str, Any],
    replicas: int,
    host: str,
    port: int,
    address: str | None = None,
) -> None:
    """Serve until a signal says stop. Every node needs onea and the model folder under the same path.

    Each replica looks for new versions in the folder, so whoever teaches it with ``onea teach`` is answered from it
    seconds later, without a restart.

    Raises:
        OneaError: Ray is not there, no cluster answers, or there is no model.
    """
    if replicas < 1:
        raise OneaError(f"--replicas is {replicas}; ask for at least one.")
    read_manifest(path)  # a sentence now rather than a replica that never starts
    serve = _import_serve()
    logging.getLogger("ray.serve").setLevel(logging.WARNING)
    stop = threading.Event()
    with ray_cluster(address):
        try:
            serve.start(http_options={"host": host, "port": port})
            serve.run(deployment(path, settings, machine, replicas), name=APP, route_prefix="/")
            for number in (signal.SIGINT, signal.SIGTERM):  # only now, because Ray puts its own in their place
                signal.signal(number, lambda *_: stop.set())
            print(f"{path} on {replicas} Ray replicas at http://{host}:{port}; prediction only", flush=True)
            stop.wait()
        finally:
            serve.shutdown()


def deployment(path: Path, settings: Settings, machine: Mapping[str, Any], replicas: int) -> Any:
    """The Ray Serve application: replicas of the app, each with the model in its own memory."""
    serve = _import_serve()
    folder, given = str(path.resolve()), dict(machine)
    prediction = dataclasses.replace(settings, prediction_only=True, token=None)

    def build() -> Any:
        from onea.serve.app import create_app
        from onea.serve.service import Service

        return create_app(Service(Path(folder), prediction, given))

    class Replica:
        """Nothing but the app."""

    options = {"num_cpus": 1, "num_gpus": 1 if str(given.get("device", "")).startswith("cuda") else 0}
    wrapped = serve.ingress(build)(Replica)
    made = serve.deployment(
        num_replicas=replicas, max_ongoing_requests=settings.limits.requests, ray_actor_options=options
    )(wrapped)
    return made.bind()


def _import_serve() -> Any:
    import_ray()
    return import_extra("ray.serve", "ray")
