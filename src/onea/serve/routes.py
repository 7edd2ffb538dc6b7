# SPDX-License-Identifier: Apache-2.0
"""The routes of the service: they read the request, call the service, and write the response."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from typing import Annotated, Any, Literal, TypeVar

from fastapi import APIRouter, Depends, Path, Query, Request, Response
from fastapi.sse import EventSourceResponse, ServerSentEvent
from prometheus_client import CONTENT_TYPE_LATEST
from starlette.concurrency import run_in_threadpool

from onea.data.decode import upload_formats
from onea.model.exemplars import count_images
from onea.model.learning.memory_report import memory_lines
from onea.model.reports import notes
from onea.model.state import State
from onea.serve.access import TokenFailures, bearer, check_token, client_address
from onea.serve.middleware import Metrics
from onea.serve.problems import Problem
from onea.serve.schemas import (
    BACKGROUND_BODY,
    LEARN_BODY,
    PREDICT_BODY,
    CheckResponse,
    ClassesResponse,
    ClassInfo,
    EditResponse,
    HealthResponse,
    HistoryResponse,
    ImagePrediction,
    PredictResponse,
    TrainingJobReport,
    UndoResponse,
    UnreadableImage,
    problem_responses,
)
from onea.serve.service import Service
from onea.serve.training_jobs import TrainingJob
from onea.serve.uploads import (
    decode_for_learning,
    decode_for_prediction,
    read_learn_request,
    read_predict_request,
    while_connected,
)
from onea.serve.workers import Batcher, CheckCache, DecoderPool

_POLL_SECONDS = 0.2  # between two reports of a training job


@dataclass(frozen=True)
class Components:
    """The objects that the routes use."""

    service: Service
    batcher: Batcher
    decoders: DecoderPool
    checks: CheckCache
    token_failures: TokenFailures
    metrics: Metrics


def _components(request: Request) -> Components:
    components: Components = request.app.state.components
    return components


App = Annotated[Components, Depends(_components)]


async def _require_token(request: Request, app: App) -> None:
    await check_token(request, app.service.settings, app.token_failures)


def _training_job(
    id: Annotated[
        str, Path(description="Id of the training job, from the response of POST /learn, /background or /refresh.")
    ],
    app: App,
) -> TrainingJob:
    return app.service.job(id)


OnBadImage = Annotated[
    Literal["fail", "skip"],
    Query(description="How to handle unreadable images: fail (refuse the request) or skip (leave them out)."),
]
Job = Annotated[TrainingJob, Depends(_training_job)]
Route = TypeVar("Route", bound=Callable[..., Any])
router = APIRouter()


def _change_route(path: str, summary: str, *statuses: int, **options: Any) -> Callable[[Route], Route]:
    """A route that changes the model and needs the token."""
    return router.post(
        path,
        tags=["teach"],
        dependencies=[Depends(bearer), Depends(_require_token)],
        responses=problem_responses(401, 403, 409, 429, 503, 507, *statuses),
        summary=summary,
        **options,
    )


def _learn_route(path: str, summary: str, body: dict[str, Any]) -> Callable[[Route], Route]:
    """A route that starts a training job."""
    return _change_route(path, summary, 400, 408, 413, 415, 422, status_code=202, openapi_extra=body)


@router.post(
    "/predict",
    tags=["predict"],
    openapi_extra=PREDICT_BODY,
    responses=problem_responses(400, 408, 413, 415, 422, 503, 507),
    summary="Predict the classes of images",
)
async def predict(
    request: Request,
    app: App,
    top: Annotated[int, Query(ge=1, le=100, description="Number of most probable classes to return.")] = 3,
    on_bad: OnBadImage = "fail",
) -> PredictResponse:
    """Predict the class of each image. The verdict may also be unsure (two or three possible classes) or unknown."""
    service, limits = app.service, app.service.settings.limits
    async with read_predict_request(request, limits) as images:
        client = client_address(request.scope)
        decoding = decode_for_prediction(images, service.side, limits, app.decoders, client, on_bad)
        batch, errors = await while_connected(request, decoding)
        skipped = [UnreadableImage(index=n, image=images[n].name, detail=reason) for n, reason in errors.items()]
    answers = await while_connected(request, app.batcher.predict(batch, top))
    app.metrics.images.inc(len(answers))
    app.metrics.unknown.inc(sum(answer.verdict == "unknown" for answer in answers))
    predictions = [ImagePrediction.of(answer) for answer in answers]
    return PredictResponse(version=answers[0].version, answers=predictions, skipped=skipped)


@router.get("/classes", tags=["predict"], responses=problem_responses(503), summary="List the classes")
async def classes(app: App) -> ClassesResponse:
    """List the classes of the model in the order in which they were taught."""
    state = app.service.current.state
    infos = [ClassInfo(name=name, images=images) for name, images in zip(state.classes, state.images, strict=True)]
    return ClassesResponse(version=state.version, count=len(infos), classes=infos)


@router.get(
    "/check",
    tags=["predict"],
    response_model=CheckResponse,
    responses=problem_responses(503),
    summary="Find classes that need more images",
)
async def check(app: App) -> Response:
    """Find classes with few images and classes that overlap, from the statistics of the model."""
    return Response(await app.checks.get(app.service.current.state), media_type="application/json")


@router.get("/history", tags=["predict"], responses=problem_responses(503), summary="List the updates")
async def history(app: App) -> HistoryResponse:
    """List all updates, oldest first, and the versions that undo can restore."""
    current = app.service.current
    return HistoryResponse(
        version=current.state.version, kept=list(current.manifest.versions.kept), updates=list(current.state.updates)
    )


@_learn_route("/learn", "Teach classes", LEARN_BODY)
async def learn(
    request: Request,
    response: Response,
    app: App,
    on_bad: OnBadImage = "fail",
    later: Annotated[
        bool, Query(description="Train the adapter later, at another update or with POST /refresh.")
    ] = False,
) -> TrainingJobReport:
    """Start a training job for new classes, or for more images of existing ones.

    The request is validated before the response. The present version answers until the job is done. Follow the job at
    `/learn/{id}/events`.
    """
    return await _start_job(request, response, app, on_bad, later=later)


@_learn_route("/background", "Teach background images", BACKGROUND_BODY)
async def background(request: Request, response: Response, app: App, on_bad: OnBadImage = "fail") -> TrainingJobReport:
    """Start a training job for images of none of the classes; similar images are more often predicted unknown.

    The classes do not change. Follow the job at `/learn/{id}/events`. It fails if many of the images show a class.
    """
    return await _start_job(request, response, app, on_bad, background=True)


@_change_route("/refresh", "Train on stored copies", 422, status_code=202)
async def refresh(response: Response, app: App) -> TrainingJobReport:
    """Start a training job on the stored copies of photos, without new ones; a version that is worse is not kept.

    The present version answers until the job is done. Follow the job at `/learn/{id}/events`.
    """
    return _started(response, app, await run_in_threadpool(app.service.refresh))


@router.get("/learn/{id}", tags=["teach"], responses=problem_responses(404, 422, 503), summary="Get a training job")
async def job(job: Job) -> TrainingJobReport:
    """Get the progress of a training job."""
    return job.report()


@router.get(
    "/learn/{id}/events",
    tags=["teach"],
    response_class=EventSourceResponse,
    responses=problem_responses(404, 422, 503),
    summary="Follow a training job",
)
async def events(job: Job) -> AsyncIterator[ServerSentEvent]:
    """Follow a training job by server-sent events: `progress` for every change, and `end` with the last report."""
    sent: TrainingJobReport | None = None
    while not job.ended.is_set():
        report = job.report()
        if sent is None or report.model_copy(update={"seconds": sent.seconds}) != sent:
            sent = report
            yield ServerSentEvent(event="progress", data=report)
        await asyncio.sleep(_POLL_SECONDS)
    yield ServerSentEvent(event="end", data=job.report())


@_change_route("/undo", "Undo the last update")
async def undo(app: App) -> UndoResponse:
    """Restore the version before the last update."""
    undone, now = await run_in_threadpool(app.service.undo)
    return UndoResponse(undone=undone.version, version=now.version, classes=len(now.classes))


@_change_route("/forget", "Remove classes", 422)
async def forget(
    app: App,
    names: Annotated[list[str], Query(alias="class", min_length=1, description="Class to remove; repeatable.")],
    everywhere: Annotated[
        bool,
        Query(description="Also remove earlier versions and the names in the history. This cannot be undone."),
    ] = False,
) -> EditResponse:
    """Remove classes. The adapter, which also learned from their images, does not change."""
    return _edit_response(await run_in_threadpool(app.service.forget, names, everywhere))


@_change_route("/rename", "Rename or merge classes", 422)
async def rename(
    app: App,
    old: Annotated[str, Query(description="Present name of the class.")],
    new: Annotated[str, Query(description="New name of the class.")],
    merge: Annotated[bool, Query(description="Merge the class into the existing class 'new'.")] = False,
) -> EditResponse:
    """Rename a class, or merge it into another class."""
    return _edit_response(await run_in_threadpool(app.service.rename, old, new, merge))


@router.get("/healthz", tags=["operate"], responses=problem_responses(503), summary="Health check")
async def healthz(app: App) -> HealthResponse:
    """Return 200 while the service accepts requests, and 503 during a shutdown."""
    service = app.service
    settings, current = service.settings, service.current
    return HealthResponse(
        status="ok",
        name=service.path.name.removesuffix(".onea"),
        version=current.state.version,
        classes=len(current.state.classes),
        learning=service.learning,
        teaching=settings.token is not None and not settings.prediction_only,
        formats=list(upload_formats()),
        stored_copies=count_images(current.state.exemplars),
        memory=memory_lines(current.state, current.manifest.params["memory"]),
        predict_images=settings.limits.predict_images,
        learn_files=settings.limits.learn_files,
    )


@router.get(
    "/metrics",
    tags=["operate"],
    response_class=Response,
    responses=problem_responses(503) | {200: {"description": "Metrics.", "content": {"text/plain": {}}}},
    summary="Prometheus metrics",
)
async def metrics(app: App) -> Response:
    """Return metrics in the text format of Prometheus."""
    state = app.service.current.state
    app.metrics.model_version.set(state.version)
    app.metrics.model_classes.set(len(state.classes))
    app.metrics.learning.set(app.service.learning)
    return Response(app.metrics.text(), headers={"Content-Type": CONTENT_TYPE_LATEST})


async def _start_job(
    request: Request,
    response: Response,
    app: Components,
    on_bad: Literal["fail", "skip"],
    *,
    background: bool = False,
    later: bool = False,
) -> TrainingJobReport:
    service, limits = app.service, app.service.settings.limits
    service.refuse_while_busy()
    async with read_learn_request(request, limits, background) as upload:
        name = upload.update_name
        if name is not None and (not name.strip() or not name.isprintable() or len(name) > 200):
            raise Problem(422, "The name of the update must have 1 to 200 printable characters.")
        decoding = decode_for_learning(
            upload, service.side, limits, app.decoders, client_address(request.scope), on_bad
        )
        batch = await while_connected(request, decoding)
    job = await run_in_threadpool(service.teach, batch, name, background=background, later=later)
    return _started(response, app, job)


def _started(response: Response, app: Components, job: TrainingJob) -> TrainingJobReport:
    """The response to a request that started a training job."""
    response.headers["Location"] = f"/learn/{job.id}"
    app.metrics.jobs.inc()
    return job.report()


def _edit_response(state: State) -> EditResponse:
    return EditResponse(version=state.version, classes=len(state.classes), remarks=notes(state.updates[-1]))
