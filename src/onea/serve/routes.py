# SPDX-License-Identifier: Apache-2.0
"""The addresses of the service. Thin: they read the request, ask the service, and write the answer."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from typing import Annotated, Any, Literal, TypeVar

from fastapi import APIRouter, Depends, Path, Query, Request, Response
from starlette.concurrency import run_in_threadpool
from starlette.responses import StreamingResponse

from onea.data.decode import formats_of_uploads
from onea.model.sentences import sentences
from onea.model.state import State
from onea.serve import metrics
from onea.serve.access import bearer, check_token, client_address
from onea.serve.batching import Batcher
from onea.serve.checking import Checks
from onea.serve.decoding import Decoders
from onea.serve.failed_tokens import FailedTokens
from onea.serve.problems import Problem
from onea.serve.schemas import (
    BACKGROUND_BODY,
    LEARN_BODY,
    PREDICT_BODY,
    BadPhoto,
    Changed,
    Checked,
    Classes,
    Health,
    History,
    ImageAnswer,
    KnownClass,
    Prediction,
    TrainingJobReport,
    Undone,
    refusals,
)
from onea.serve.service import Service
from onea.serve.training_jobs import TrainingJob
from onea.serve.uploads import askable, images_to_learn, images_to_predict, learnable, while_connected

_TICK = 0.2  # seconds between two looks at a training job
_HEARTBEAT = 15  # seconds after which proxies would take a silent stream for dead


@dataclass(frozen=True)
class Parts:
    """What the routes work with."""

    service: Service
    batcher: Batcher
    decoders: Decoders
    checks: Checks
    failed_tokens: FailedTokens
    counters: metrics.Metrics


def _parts(request: Request) -> Parts:
    parts: Parts = request.app.state.parts
    return parts


async def _teacher(request: Request) -> None:
    parts = _parts(request)
    await check_token(request, parts.service.settings, parts.failed_tokens)


Serving = Annotated[Parts, Depends(_parts)]
OnBadImage = Annotated[
    Literal["fail", "skip"], Query(description="What an image that cannot be read does: fail the request, or nothing.")
]
TrainingJobId = Annotated[str, Path(description="As the answer of POST /learn or /background says.")]
Route = TypeVar("Route", bound=Callable[..., Any])
router = APIRouter()


def _teaching(path: str, summary: str, *refused: int, **how: Any) -> Callable[[Route], Route]:
    """An address that changes the model, for whoever has the token."""
    return router.post(
        path,
        tags=["teach"],
        dependencies=[Depends(bearer), Depends(_teacher)],
        responses=refusals(401, 403, 409, 429, 503, 507, *refused),
        summary=summary,
        **how,
    )


def _taught(path: str, summary: str, body: dict[str, Any]) -> Callable[[Route], Route]:
    """An address that learns from images in a training job."""
    return _teaching(path, summary, 400, 408, 413, 415, 422, status_code=202, openapi_extra=body)


@router.post(
    "/predict",
    tags=["ask"],
    openapi_extra=PREDICT_BODY,
    responses=refusals(400, 408, 413, 415, 422, 503, 507),
    summary="What one or several images show",
)
async def predict(
    request: Request,
    serving: Serving,
    top: Annotated[int, Query(ge=1, le=100, description="How many of the most probable classes to name.")] = 3,
    on_bad: OnBadImage = "fail",
) -> Prediction:
    """One verdict for each image: a class, unsure between two or three, or unknown: like nothing that was taught."""
    service, limits = serving.service, serving.service.settings.limits
    async with images_to_predict(request, limits) as sent:
        client = client_address(request.scope)
        reading = askable(sent, service.side, limits, serving.decoders, client, on_bad)
        batch, bad = await while_connected(request, reading)
        skipped = [BadPhoto(index=row, image=sent[row].name, detail=reason) for row, reason in bad.items()]
    answers = await while_connected(request, serving.batcher.ask(batch, top))
    serving.counters.images.inc(len(answers))
    serving.counters.unknown.inc(sum(answer.verdict == "unknown" for answer in answers))
    found = [ImageAnswer.of(answer) for answer in answers]
    return Prediction(version=answers[0].version, answers=found, skipped=skipped)


@router.get("/classes", tags=["ask"], responses=refusals(503), summary="What the model knows")
async def classes(serving: Serving) -> Classes:
    """Every class that can be answered, in the order it was taught."""
    state = serving.service.present.state
    known = [KnownClass(name=name, images=images) for name, images in zip(state.classes, state.images, strict=True)]
    return Classes(version=state.version, count=len(known), classes=known)


@router.get(
    "/check",
    tags=["ask"],
    response_model=Checked,
    responses=refusals(503),
    summary="Which classes need more photos",
)
async def check(serving: Serving) -> Response:
    """Classes with few photos and classes that overlap, as the model's own statistics tell, the neediest first."""
    return Response(await serving.checks.of(serving.service.present.state), media_type="application/json")


@router.get("/history", tags=["ask"], responses=refusals(503), summary="How the model came to know it")
async def history(serving: Serving) -> History:
    """Every update, oldest first, and the versions that undo can go back to."""
    present = serving.service.present
    return History(
        version=present.state.version, kept=list(present.manifest.versions.kept), updates=list(present.state.updates)
    )


@_taught("/learn", "Teach classes", LEARN_BODY)
async def learn(
    request: Request, response: Response, serving: Serving, on_bad: OnBadImage = "fail"
) -> TrainingJobReport:
    """Learn new classes, or more images of known ones, in the background; the present version answers meanwhile.

    Everything that can be checked is checked before the answer. Follow the training job at `/learn/{id}/events`.
    """
    return await _job(request, response, serving, on_bad)


@_taught("/background", "Teach what shows none of the classes", BACKGROUND_BODY)
async def background(
    request: Request, response: Response, serving: Serving, on_bad: OnBadImage = "fail"
) -> TrainingJobReport:
    """Learn what images look like that show none of the classes; what looks like them is answered unknown sooner.

    No class changes. Follow the training job at `/learn/{id}/events`; it fails if many of the images show a class.
    """
    return await _job(request, response, serving, on_bad, background=True)


@router.get("/learn/{id}", tags=["teach"], responses=refusals(404, 422, 503), summary="The progress of a training job")
async def job(id: TrainingJobId, serving: Serving) -> TrainingJobReport:
    """The state of a training job now."""
    return TrainingJobReport(**serving.service.job(id).report())


@router.get(
    "/learn/{id}/events",
    tags=["teach"],
    response_class=StreamingResponse,
    responses=refusals(404, 422, 503) | {200: {"description": "Reports.", "content": {"text/event-stream": {}}}},
    summary="A training job as it goes on",
)
async def events(id: TrainingJobId, serving: Serving) -> StreamingResponse:
    """Server-sent events: `progress` with the report whenever it changes, and `end` with the last one."""
    unbuffered = {"X-Accel-Buffering": "no"}  # a proxy must not collect what should arrive at once
    return StreamingResponse(_events(serving.service.job(id)), media_type="text/event-stream", headers=unbuffered)


@_teaching("/undo", "Go back to before the last update")
async def undo(serving: Serving) -> Undone:
    """Go back to before the last update."""
    undone, now = await run_in_threadpool(serving.service.undo)
    return Undone(undone=undone.version, version=now.version, classes=len(now.classes))


@_teaching("/forget", "No longer answer some classes", 422)
async def forget(
    serving: Serving,
    name: Annotated[list[str], Query(alias="class", min_length=1, description="Each of them.")],
    everywhere: Annotated[
        bool, Query(description="Remove earlier versions and the names in the history, too: there is no undo.")
    ] = False,
) -> Changed:
    """No longer answer these classes. What the adapter learned from their images stays in it."""
    return _changed(await run_in_threadpool(serving.service.forget, name, everywhere))


@_teaching("/rename", "Call a class by another name", 422)
async def rename(
    serving: Serving,
    old: Annotated[str, Query(description="What the class is called now.")],
    new: Annotated[str, Query(description="What it shall be called.")],
    merge: Annotated[bool, Query(description="The new name is a class, too: make the two one.")] = False,
) -> Changed:
    """Call a class by another name, or make two classes one."""
    return _changed(await run_in_threadpool(serving.service.rename, old, new, merge))


@router.get("/healthz", tags=["operate"], responses=refusals(503), summary="Whether it serves")
async def healthz(serving: Serving) -> Health:
    """Answers 200 while the service takes requests, and 503 once it is being stopped."""
    service = serving.service
    settings = service.settings
    return Health(
        status="ok",
        name=service.path.name.removesuffix(".onea"),
        version=service.present.state.version,
        classes=len(service.present.state.classes),
        learning=service.learning,
        teaching=settings.token is not None and not settings.prediction_only,
        formats=list(formats_of_uploads()),
        predict_images=settings.limits.predict_images,
        learn_files=settings.limits.learn_files,
    )


@router.get(
    "/metrics",
    tags=["operate"],
    response_class=Response,
    responses=refusals(503) | {200: {"description": "Counters.", "content": {"text/plain": {}}}},
    summary="Counters for Prometheus",
)
async def prometheus(serving: Serving) -> Response:
    """Counters in the text format of Prometheus."""
    state = serving.service.present.state
    counters = serving.counters
    counters.model_version.set(state.version)
    counters.model_classes.set(len(state.classes))
    counters.learning.set(serving.service.learning)
    return Response(counters.text(), headers={"Content-Type": metrics.CONTENT_TYPE})


async def _job(
    request: Request, response: Response, serving: Parts, on_bad: Literal["fail", "skip"], *, background: bool = False
) -> TrainingJobReport:
    """A training job that has begun."""
    service, limits = serving.service, serving.service.settings.limits
    service.refuse_while_busy()
    async with images_to_learn(request, limits, background) as (sent, left_out, name):
        if name is not None and (not name.strip() or not name.isprintable() or len(name) > 200):
            raise Problem(422, "The name of the update must have 1 to 200 printable characters.")
        client = client_address(request.scope)
        reading = learnable(sent, left_out, service.side, limits, serving.decoders, client, on_bad)
        batch = await while_connected(request, reading)
    job = await run_in_threadpool(service.teach, batch, name, background=background)
    response.headers["Location"] = f"/learn/{job.id}"
    serving.counters.jobs.inc()
    return TrainingJobReport(**job.report())


def _changed(state: State) -> Changed:
    return Changed(version=state.version, classes=len(state.classes), remarks=sentences(state.updates[-1]))


async def _events(job: TrainingJob) -> AsyncIterator[str]:
    told: dict[str, Any] = {}
    silent = 0.0
    while True:
        over = job.ended.is_set()  # before the report, so that the last one is told
        report = job.report()
        if over:
            yield f"event: end\ndata: {json.dumps(report)}\n\n"
            return
        if report | {"seconds": 0} != told:
            told, silent = report | {"seconds": 0}, 0.0
            yield f"event: progress\ndata: {json.dumps(report)}\n\n"
        elif silent >= _HEARTBEAT:
            silent = 0.0
            yield ": still here\n\n"
        await asyncio.sleep(_TICK)
        silent += _TICK
