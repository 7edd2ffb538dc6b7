# SPDX-License-Identifier: Apache-2.0
"""The schemas of the service's answers."""

from __future__ import annotations

import dataclasses
from typing import Any, Literal

from pydantic import BaseModel, Field

from onea.model.answers import Answer, Verdict
from onea.model.evaluation.check import Advice, Check
from onea.serve.problems import MEDIA_TYPE


class Likely(BaseModel):
    """A class that an image may show."""

    name: str = Field(alias="class")
    probability: float = Field(description="Those of all classes and none_of_these add up to 1.")


class ImageAnswer(BaseModel):
    """What the model says about one image."""

    image: str = Field(description="The name of the file as it was sent, or its number.")
    name: str = Field(
        alias="class", description="The most probable class, or 'unknown' where the verdict is 'unknown'."
    )
    verdict: Verdict = Field(
        description="'unknown' if none_of_these is more than one half, 'answer' if a class has at least one half, or "
        "'unsure'."
    )
    probability: float = Field(description="Of the class; where it is 'unknown', none_of_these.")
    candidates: list[Likely] = Field(description="Where the verdict is 'unsure': the two or three classes it may be.")
    top: list[Likely] = Field(description="The most probable classes, best first; whatever the verdict.")
    none_of_these: float = Field(description="Probability that it shows none of the classes.")
    version: int = Field(description="Of the model.")

    @classmethod
    def of(cls, answer: Answer) -> ImageAnswer:
        """An answer as clients get it."""
        return cls.model_validate(answer.as_json())


class BadPhoto(BaseModel):
    """An image that could not be read."""

    index: int = Field(description="Its place in the request, from 0.")
    image: str = Field(description="The name of the file as it was sent, or its number.")
    detail: str = Field(description="What is wrong with it.")


class Prediction(BaseModel):
    """One answer for each image of a request, in its order, all by one version of the model."""

    version: int
    answers: list[ImageAnswer]
    skipped: list[BadPhoto] = Field(description="With on_bad=skip: images that could not be read.")


class KnownClass(BaseModel):
    """A class that was taught."""

    name: str
    images: int = Field(description="Images it was taught with.")


class Classes(BaseModel):
    """The classes that can be answered."""

    version: int
    count: int
    classes: list[KnownClass]


class CheckedClass(BaseModel):
    """Whether a class is taught well enough."""

    name: str
    images: int = Field(description="Images it was taught with.")
    most_like: str | None = Field(description="The class that it overlaps most with.")
    advice: Advice


class OverlappingPair(BaseModel):
    """Two classes that are alike."""

    first: str
    second: str
    overlap: float = Field(description="Share of their images that would be taken for the other, as far as is known.")


class AbsorbingClass(BaseModel):
    """A class that many held-out images of others are taken for."""

    name: str
    mistakes: int = Field(description="Held-out images of other classes that are taken for it.")
    share: float = Field(description="Of all mistakes.")
    of: list[str] = Field(description="The classes that most of them are of.")


class MisclassifiedClass(BaseModel):
    """A class whose held-out images are often taken for others."""

    name: str
    mistakes: int
    images: int = Field(description="Held-out images of the class.")
    taken_for: str = Field(description="The class that most of the mistakes end in.")


class HeldOutMistakes(BaseModel):
    """Mistakes among images that were held out of updates, as far as they are kept."""

    images: int
    mistakes: int
    absorbing: list[AbsorbingClass] = Field(description="Classes that many mistakes end in.")
    misclassified: list[MisclassifiedClass] = Field(description="Classes that are often misclassified.")


class Checked(BaseModel):
    """What the model's own statistics tell about its classes."""

    version: int
    classes: list[CheckedClass] = Field(description="The neediest first.")
    pairs: list[OverlappingPair] = Field(description="The most alike first; of each class its nearest.")
    mistakes: HeldOutMistakes

    @classmethod
    def of(cls, found: Check) -> Checked:
        """A check as clients get it."""
        return cls(
            version=found.version,
            classes=[
                CheckedClass(name=one.name, images=one.taught, most_like=one.rival, advice=one.advice)
                for one in found.classes
            ],
            pairs=[OverlappingPair(first=one.first, second=one.second, overlap=one.overlap) for one in found.pairs],
            mistakes=HeldOutMistakes.model_validate(dataclasses.asdict(found.mistakes)),
        )


class History(BaseModel):
    """Every update of the model, oldest first."""

    version: int
    kept: list[int] = Field(description="Versions on disk, oldest first; the last one is the present.")
    updates: list[dict[str, Any]]


class Health(BaseModel):
    """Whether and what the service serves."""

    status: Literal["ok"]
    name: str
    version: int
    classes: int
    learning: bool
    teaching: bool = Field(description="Whether learning and undo are offered to whoever has the token.")
    formats: list[str] = Field(description="Image formats that can be sent.")
    predict_images: int = Field(description="Images that one request to predict may have.")
    learn_files: int = Field(description="Images that one form to learn may have; a zip may have more.")


class TrainingJobReport(BaseModel):
    """The progress of a training job."""

    id: str
    status: Literal["waiting", "learning", "done", "failed"]
    classes: list[str] = Field(description="What is taught; none where images of no class are.")
    images: int
    note: str
    done: int = Field(description="Training steps done, in images.")
    total: int = Field(description="Training steps to do, in images; 0 where nothing is to be trained.")
    seconds: float
    version: int | None = Field(description="Of the model that the training job made.")
    detail: str | None = Field(description="Why it failed.")
    skipped: list[str] = Field(description="With on_bad=skip: images that could not be read, and why.")
    remarks: list[str] = Field(description="Once it is done, what there is to say about it, in sentences.")


class Changed(BaseModel):
    """What answers after a change."""

    version: int
    classes: int
    remarks: list[str] = Field(description="What to know about it.")


class Undone(BaseModel):
    """What was undone, and what answers now."""

    undone: int
    version: int
    classes: int


class ProblemDocument(BaseModel):
    """RFC 9457: what is wrong and what to do, in one sentence."""

    type: str
    title: str
    status: int
    detail: str


def refusals(*statuses: int) -> dict[int | str, dict[str, Any]]:
    """The problem documents that a route may answer with, besides those that any may."""
    schema = {"schema": {"$ref": "#/components/schemas/ProblemDocument"}}
    return {
        status: {"description": _MEANING[status], "content": {MEDIA_TYPE: schema}}
        for status in (400, *statuses, 421, 431)
    }


_MEANING = {
    400: "The request cannot be read.",
    401: "The token is missing or wrong.",
    403: "Teaching is switched off.",
    404: "There is no such thing.",
    405: "The method is not one of this address.",
    408: "The request came too slowly, or stopped half-way.",
    409: "The model is being changed, or cannot be.",
    413: "More than allowed.",
    415: "Neither an image nor a form.",
    421: "The service does not go by the name that was asked for.",
    422: "Not an image, or not something to learn from.",
    429: "Too many wrong tokens.",
    431: "The address and the headers are too long.",
    503: "Busy, or being stopped.",
    507: "No disk space is left.",
}
_BINARY = {"type": "string", "format": "binary"}
_IMAGES = {"type": "array", "items": _BINARY, "minItems": 1}

PREDICT_BODY: dict[str, Any] = {
    "requestBody": {
        "required": True,
        "description": "One image as the body, or one or several as files of a form.",
        "content": {
            "multipart/form-data": {
                "schema": {"type": "object", "required": ["images"], "properties": {"images": _IMAGES}}
            },
            "image/*": {"schema": _BINARY},
            "application/octet-stream": {"schema": _BINARY},
        },
    }
}
LEARN_BODY: dict[str, Any] = {
    "requestBody": {
        "required": True,
        "description": "A zip with one folder of images for each class, or images and their class as a form.",
        "content": {
            "multipart/form-data": {
                "schema": {
                    "type": "object",
                    "properties": {
                        "class": {
                            "type": "string",
                            "description": "With images: what they show; once, or once for each image in their order.",
                        },
                        "images": {**_IMAGES, "description": "Two or more; better ten."},
                        "zip": {**_BINARY, "description": "Instead of class and images."},
                        "name": {"type": "string", "description": "What the history calls it."},
                    },
                }
            },
            "application/zip": {"schema": _BINARY},
        },
    }
}
BACKGROUND_BODY: dict[str, Any] = {
    "requestBody": {
        "required": True,
        "description": "Images of none of the classes, as files of a form.",
        "content": {
            "multipart/form-data": {
                "schema": {
                    "type": "object",
                    "required": ["images"],
                    "properties": {
                        "images": _IMAGES,
                        "name": {"type": "string", "description": "What the history calls it."},
                    },
                }
            }
        },
    }
}
