# SPDX-License-Identifier: Apache-2.0
"""The schemas of requests and responses."""

from __future__ import annotations

import dataclasses
from collections import Counter
from typing import Any, Literal

from pydantic import BaseModel, Field

from onea.model.answers import Answer, Verdict
from onea.model.evaluation.check import Advice, Check
from onea.serve.problems import MEDIA_TYPE


class ClassProbability(BaseModel):
    """The probability of a class."""

    name: str = Field(alias="class")
    probability: float = Field(description="Those of all classes and none_of_these add up to 1.")


class ImagePrediction(BaseModel):
    """The prediction for one image."""

    image: str = Field(description="Name of the uploaded file, or its number.")
    name: str = Field(alias="class", description="The most probable class, or 'unknown' if the verdict is 'unknown'.")
    verdict: Verdict = Field(
        description="'unknown' if none_of_these is above 0.5, 'answer' if a class has a probability of at least 0.5, "
        "else 'unsure'."
    )
    probability: float = Field(description="Probability of the class; if it is 'unknown', none_of_these.")
    candidates: list[ClassProbability] = Field(description="The two or three possible classes of an 'unsure' verdict.")
    top: list[ClassProbability] = Field(description="The most probable classes, best first, for any verdict.")
    none_of_these: float = Field(description="Probability that the image shows none of the classes.")
    version: int = Field(description="Version of the model.")

    @classmethod
    def of(cls, answer: Answer) -> ImagePrediction:
        """The response for an answer."""
        return cls.model_validate(answer.as_json())


class UnreadableImage(BaseModel):
    """An image that could not be read."""

    index: int = Field(description="Position in the request, from 0.")
    image: str = Field(description="Name of the uploaded file, or its number.")
    detail: str = Field(description="What is wrong with it.")


class PredictResponse(BaseModel):
    """One prediction for each image of the request, in its order, all by one version of the model."""

    version: int
    answers: list[ImagePrediction]
    skipped: list[UnreadableImage] = Field(description="Unreadable images, with on_bad=skip.")


class ClassInfo(BaseModel):
    """A class of the model."""

    name: str
    images: int = Field(description="Number of training images.")


class ClassesResponse(BaseModel):
    """The classes of the model."""

    version: int
    count: int
    classes: list[ClassInfo]


class ClassCheck(BaseModel):
    """Whether a class has enough training images and can be distinguished from others."""

    name: str
    images: int = Field(description="Number of training images.")
    most_like: str | None = Field(description="The class with the largest overlap.")
    advice: Advice


class OverlappingPair(BaseModel):
    """Two similar classes."""

    first: str
    second: str
    overlap: float = Field(description="Estimated fraction of their images that are confused with the other class.")


class AbsorbingClass(BaseModel):
    """A class that many held-out images of other classes are misclassified as."""

    name: str
    mistakes: int = Field(description="Number of held-out images of other classes misclassified as this class.")
    share: float = Field(description="Fraction of all mistakes.")
    of: list[str] = Field(description="The most frequent true classes of these images.")


class MisclassifiedClass(BaseModel):
    """A class whose held-out images are often misclassified."""

    name: str
    mistakes: int
    images: int = Field(description="Number of held-out images of the class.")
    predicted: str = Field(description="The class that most of them are misclassified as.")


class HeldOutMistakes(BaseModel):
    """Misclassified held-out images, as far as the model has them on record."""

    images: int
    mistakes: int
    absorbing: list[AbsorbingClass] = Field(description="Classes that many images are misclassified as.")
    misclassified: list[MisclassifiedClass] = Field(description="Classes that are often misclassified.")


MAX_CHECKED = 500  # classes and pairs in a response


class CheckResponse(BaseModel):
    """The check of the classes, from the statistics of the model."""

    version: int
    advice: dict[str, int] = Field(description="The number of classes with each advice.")
    classes: list[ClassCheck] = Field(description=f"Those that need images most come first; at most {MAX_CHECKED}.")
    pairs: list[OverlappingPair] = Field(
        description=f"Each class with its most similar ones; the largest overlap first, at most {MAX_CHECKED}."
    )
    mistakes: HeldOutMistakes

    @classmethod
    def of(cls, check: Check) -> CheckResponse:
        """The response for a check."""
        return cls(
            version=check.version,
            advice=dict(Counter(entry.advice for entry in check.classes)),
            classes=[
                ClassCheck(name=entry.name, images=entry.taught, most_like=entry.rival, advice=entry.advice)
                for entry in check.classes[:MAX_CHECKED]
            ],
            pairs=[
                OverlappingPair(first=pair.first, second=pair.second, overlap=pair.overlap)
                for pair in check.pairs[:MAX_CHECKED]
            ],
            mistakes=HeldOutMistakes.model_validate(dataclasses.asdict(check.mistakes)),
        )


class HistoryResponse(BaseModel):
    """All updates of the model, oldest first."""

    version: int
    kept: list[int] = Field(description="Versions on disk, oldest first; the last one is the present version.")
    updates: list[dict[str, Any]]


class HealthResponse(BaseModel):
    """The state of the service, and what it accepts."""

    status: Literal["ok"]
    name: str
    version: int
    classes: int
    learning: bool = Field(description="Whether a training job is running.")
    teaching: bool = Field(description="Whether clients with the token may change the model.")
    formats: list[str] = Field(description="Supported image formats.")
    stored_copies: int = Field(description="Number of small copies of photos that the model stores.")
    memory: list[str] = Field(description="What is stored, and the classes that wait for training, in sentences.")
    predict_images: int = Field(description="Largest number of images in one request to predict.")
    learn_files: int = Field(description="Largest number of images in one form to learn; a zip may have more.")


class TrainingJobReport(BaseModel):
    """The progress of a training job."""

    id: str
    status: Literal["waiting", "learning", "done", "failed"]
    classes: list[str] = Field(description="Classes that are taught; empty for background images.")
    images: int
    note: str = Field(description="The current step.")
    done: int = Field(description="Completed training steps, in images.")
    total: int = Field(description="All training steps, in images; 0 if nothing is trained.")
    seconds: float
    version: int | None = Field(description="The new version of the model, once the job is done.")
    detail: str | None = Field(description="Why the job failed.")
    skipped: list[str] = Field(description="Unreadable images and the reasons, with on_bad=skip.")
    remarks: list[str] = Field(description="Results and advice in sentences, once the job is done.")


class EditResponse(BaseModel):
    """The model after a change."""

    version: int
    classes: int
    remarks: list[str] = Field(description="Consequences of the change, in sentences.")


class UndoResponse(BaseModel):
    """The version that was undone, and the model after it."""

    undone: int
    version: int
    classes: int


class ProblemDocument(BaseModel):
    """RFC 9457: what is wrong and what to do, in one sentence."""

    type: str
    title: str
    status: int
    detail: str


def problem_responses(*statuses: int) -> dict[int | str, dict[str, Any]]:
    """The problem documents that a route may return, besides those of every route."""
    schema = {"schema": {"$ref": "#/components/schemas/ProblemDocument"}}
    return {
        status: {"description": _PROBLEMS[status], "content": {MEDIA_TYPE: schema}}
        for status in (400, *statuses, 421, 431)
    }


_PROBLEMS = {
    400: "The request is malformed.",
    401: "The token is missing or wrong.",
    403: "Teaching is disabled.",
    404: "Not found.",
    405: "The method is not allowed.",
    408: "The request was too slow or stopped half-way.",
    409: "The model is being changed, or cannot be changed.",
    413: "The request exceeds a limit.",
    415: "The media type is not supported.",
    421: "The host name is not allowed.",
    422: "The images or parameters are invalid.",
    429: "Too many wrong tokens.",
    431: "The URL and the headers are too long.",
    503: "The service is busy or shutting down.",
    507: "The service has no memory or disk space left.",
}
_FILE = {"type": "string", "format": "binary"}
_IMAGES = {"type": "array", "items": _FILE, "minItems": 1}
_NAME = {"type": "string", "description": "Name of the update in the history."}


def _request_body(description: str, form: dict[str, Any], *other_types: str) -> dict[str, Any]:
    """The OpenAPI description of a body that is a form or, with another media type, a file."""
    content: dict[str, Any] = {"multipart/form-data": {"schema": {"type": "object", **form}}}
    content |= {media_type: {"schema": _FILE} for media_type in other_types}
    return {"requestBody": {"required": True, "description": description, "content": content}}


PREDICT_BODY = _request_body(
    "One image as the body, or one or more images as files of a form.",
    {"required": ["images"], "properties": {"images": _IMAGES}},
    "image/*",
    "application/octet-stream",
)
LEARN_BODY = _request_body(
    "A zip with one folder of images per class, or images and their class as a form.",
    {
        "properties": {
            "class": {
                "type": "string",
                "description": "Class of the images: once for all, or once for each image in their order.",
            },
            "images": {**_IMAGES, "description": "At least two of a new class; ten or more are better."},
            "zip": {**_FILE, "description": "A zip instead of class and images."},
            "name": _NAME,
        }
    },
    "application/zip",
)
BACKGROUND_BODY = _request_body(
    "Images that show none of the classes, as files of a form.",
    {"required": ["images"], "properties": {"images": _IMAGES, "name": _NAME}},
)
