# SPDX-License-Identifier: Apache-2.0
"""The app: routes, page and middleware around one service."""

from __future__ import annotations

import asyncio
import logging
import warnings
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, closing, suppress
from pathlib import Path
from typing import Any

from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi
from starlette.concurrency import run_in_threadpool
from starlette.responses import FileResponse
from starlette.staticfiles import StaticFiles

from onea import __version__
from onea.serve import metrics, problems
from onea.serve.batching import Batcher
from onea.serve.checking import Checks
from onea.serve.decoding import Decoders
from onea.serve.failed_tokens import FailedTokens
from onea.serve.middleware import ServiceMiddleware
from onea.serve.routes import Parts, router
from onea.serve.schemas import ProblemDocument
from onea.serve.service import Service

STATIC = Path(__file__).parent / "static"
_DESCRIPTION = (
    "A model that learns classes as they arrive. Every answer names the version of the model that gave it. "
    "Whatever is wrong with a request is said in one sentence in a problem document (RFC 9457)."
)


def create_app(service: Service) -> FastAPI:
    """The service as an ASGI app."""
    logging.getLogger("python_multipart").setLevel(logging.ERROR)  # it would note every malformed form,
    warnings.filterwarnings("ignore", module="PIL")  # and Pillow every odd tag of every image
    counters = metrics.Metrics()
    middlewares: list[ServiceMiddleware] = []

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        settings = service.settings
        batcher = Batcher(
            lambda: service.present.snapshot, settings.batch, settings.wait, counters.batch_images.observe
        )
        with closing(Decoders(settings.limits)) as decoders, closing(Checks()) as checks:
            app.state.parts = Parts(service, batcher, decoders, checks, FailedTokens(), counters)
            tasks = [asyncio.create_task(batcher.run())]
            if settings.follow:
                tasks.append(asyncio.create_task(_follow(service, settings.follow)))
            yield
            service.close(settings.grace)
            await run_in_threadpool(service.settle)
            for task in tasks:
                task.cancel()
                with suppress(asyncio.CancelledError):
                    await task

    def with_middleware(inner: Any) -> ServiceMiddleware:
        middlewares.append(ServiceMiddleware(inner, service.settings, lambda: service.closing, counters))
        return middlewares[-1]

    app = FastAPI(
        title="onea", version=__version__, description=_DESCRIPTION, lifespan=lifespan, docs_url=None, redoc_url=None
    )
    app.state.active = lambda: sum(middleware.active for middleware in middlewares)
    app.add_middleware(with_middleware)
    problems.install(app)
    app.include_router(router)
    app.mount("/static", StaticFiles(directory=STATIC), name="static")
    for address, page in (("/", "index.html"), ("/docs", "docs.html")):
        _add_page(app, address, page)
    app.openapi = lambda: _openapi(app)  # type: ignore[method-assign]
    return app


def _add_page(app: FastAPI, address: str, page: str) -> None:
    async def show() -> FileResponse:
        return FileResponse(STATIC / page, headers={"Cache-Control": "no-cache"})

    app.add_api_route(address, show, include_in_schema=False, response_class=FileResponse)


async def _follow(service: Service, seconds: float) -> None:
    """Take over what other processes do to the model folder."""
    while True:
        await asyncio.sleep(seconds)
        try:
            await run_in_threadpool(service.refresh)
        except Exception as error:  # whatever it is, the version that answers goes on answering
            problems.unexpected(error)


def _openapi(app: FastAPI) -> dict[str, Any]:
    """FastAPI's document, with the schema that all problem documents share."""
    if not app.openapi_schema:
        document = get_openapi(title=app.title, version=app.version, description=app.description, routes=app.routes)
        schemas = document["components"]["schemas"]
        schemas["ProblemDocument"] = ProblemDocument.model_json_schema()
        for name in ("HTTPValidationError", "ValidationError"):  # ours are problem documents
            schemas.pop(name, None)
        for operations in document["paths"].values():
            for operation in operations.values():
                if "application/json" in operation["responses"].get("422", {}).get("content", {}):
                    del operation["responses"]["422"]
        app.openapi_schema = document
    return app.openapi_schema
