# SPDX-License-Identifier: Apache-2.0
"""The FastAPI app: routes, page and middleware of one service."""

from __future__ import annotations

import asyncio
import logging
import warnings
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, closing, suppress
from functools import partial
from pathlib import Path
from typing import Any

from fastapi import FastAPI
from starlette.concurrency import run_in_threadpool
from starlette.responses import FileResponse
from starlette.staticfiles import StaticFiles

from onea import __version__
from onea.serve import problems
from onea.serve.access import TokenFailures
from onea.serve.middleware import Metrics, ServiceMiddleware
from onea.serve.routes import Components, router
from onea.serve.schemas import ProblemDocument
from onea.serve.service import Service
from onea.serve.workers import Batcher, CheckCache, DecoderPool

_IDLE_POLL_SECONDS = 1.0
STATIC = Path(__file__).parent / "static"
_DESCRIPTION = (
    "An image classifier that learns new classes incrementally. Every prediction names the version of the model. "
    "Every error is a problem document (RFC 9457) with one sentence."
)


def create_app(service: Service) -> FastAPI:
    """The service as an ASGI app."""
    # Otherwise a client could fill the log: with malformed forms, and with images that have invalid tags.
    logging.getLogger("python_multipart").setLevel(logging.ERROR)
    warnings.filterwarnings("ignore", module="PIL")
    metrics = Metrics()

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        settings = service.settings
        batcher = Batcher(
            lambda: service.current.snapshot, settings.batch_size, settings.batch_wait, metrics.batch_images.observe
        )
        with closing(DecoderPool(settings.limits)) as decoders, closing(CheckCache()) as checks:
            app.state.components = Components(service, batcher, decoders, checks, TokenFailures(), metrics)
            tasks = [asyncio.create_task(batcher.run())]
            if settings.poll_seconds:
                tasks.append(asyncio.create_task(_poll(service.reload, settings.poll_seconds)))
            if settings.idle_training:
                seconds = min(settings.idle_training, _IDLE_POLL_SECONDS)
                tasks.append(asyncio.create_task(_poll(service.train_if_idle, seconds)))
            yield
            service.close(settings.grace)
            await run_in_threadpool(service.wait_for_job)
            for task in tasks:
                task.cancel()
                with suppress(asyncio.CancelledError):
                    await task

    app = FastAPI(
        title="onea", version=__version__, description=_DESCRIPTION, lifespan=lifespan, docs_url=None, redoc_url=None
    )
    app.state.metrics = metrics
    app.add_middleware(
        ServiceMiddleware, settings=service.settings, is_closing=lambda: service.closing, metrics=metrics
    )
    problems.install(app)
    app.include_router(router)
    app.mount("/static", StaticFiles(directory=STATIC), name="static")
    for path, file in (("/", "index.html"), ("/docs", "docs.html")):
        app.add_api_route(path, partial(_page, file), include_in_schema=False, response_class=FileResponse)
    app.openapi = lambda: _openapi(app)  # type: ignore[method-assign]
    return app


async def _page(file: str) -> FileResponse:
    return FileResponse(STATIC / file, headers={"Cache-Control": "no-cache"})


async def _poll(action: Callable[[], None], seconds: float) -> None:
    """Repeat an action of the service: load changes by other processes, or start a training that is due."""
    while True:
        await asyncio.sleep(seconds)
        try:
            await run_in_threadpool(action)
        except Exception as error:  # the current version continues to answer
            problems.unexpected(error)


def _openapi(app: FastAPI) -> dict[str, Any]:
    """FastAPI's document with the schema that all problem documents share."""
    document = FastAPI.openapi(app)
    document["components"]["schemas"]["ProblemDocument"] = ProblemDocument.model_json_schema()
    return document
