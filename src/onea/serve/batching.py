# SPDX-License-Identifier: Apache-2.0
"""Images of requests that arrive together go through the network together."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field

import numpy as np
import torch

from onea.data.dataset import Pixels
from onea.model.answers import Answer, Snapshot
from onea.model.learning.images import DecodedImages


@dataclass(frozen=True, eq=False)
class Question:
    """The images of one request; they are always answered by one version of the model.

    Attributes:
        images: what is asked about.
        top: how many answers are wanted about each.
    """

    images: DecodedImages
    top: int
    answered: asyncio.Future[list[Answer]] = field(repr=False)


def answer_together(snapshot: Snapshot, questions: Sequence[Question]) -> list[list[Answer]]:
    """The answers to several questions from one pass through the network."""
    pixels: Pixels = np.concatenate([question.images.pixels for question in questions])
    names = tuple(name for question in questions for name in question.images.names)
    parts = snapshot.judge(DecodedImages(pixels, None, names)).split([len(question.images) for question in questions])
    return [snapshot.answers_from(q.images, part, q.top) for q, part in zip(questions, parts, strict=True)]


class Batcher:
    """Collects questions for a moment, or until there are enough images, and answers them in one pass.

    While one pass runs the next questions pile up, so a busy service batches without waiting at all.

    Args:
        present: the version of the model that answers, taken anew for every pass.
        most: images in a pass; a question with more has a pass of its own.
        wait: seconds that the first question waits for others.
        told: hears how many images each pass had.
    """

    def __init__(
        self, present: Callable[[], Snapshot], most: int, wait: float, told: Callable[[int], None] = lambda images: None
    ) -> None:
        self._present, self._most, self._wait, self._told = present, most, wait, told
        self._questions: asyncio.Queue[Question] = asyncio.Queue()
        self._left_over: Question | None = None
        # A new thread would copy the thread count of a decomposition that happens to run (see onea.tensors).
        threads = torch.get_num_threads()
        self._thread = ThreadPoolExecutor(1, "onea-answers", initializer=torch.set_num_threads, initargs=(threads,))

    async def ask(self, images: DecodedImages, top: int) -> list[Answer]:
        """The answers about some images, when their turn has come."""
        question = Question(images, top, asyncio.get_running_loop().create_future())
        self._questions.put_nowait(question)
        return await question.answered

    async def run(self) -> None:
        """Answer for ever, until cancelled."""
        loop = asyncio.get_running_loop()
        try:
            while True:
                questions = await self._collected()
                try:
                    answers = await loop.run_in_executor(self._thread, answer_together, self._present(), questions)
                except Exception as error:
                    _fail(questions, error)
                    continue
                self._told(sum(len(question.images) for question in questions))
                for question, answer in zip(questions, answers, strict=True):
                    if not question.answered.done():  # a client that went away waits no more
                        question.answered.set_result(answer)
        finally:
            self._thread.shutdown(wait=False)

    async def _collected(self) -> list[Question]:
        loop = asyncio.get_running_loop()
        first = self._left_over or await self._questions.get()
        self._left_over = None
        while first.answered.done():  # its client has gone
            first = await self._questions.get()
        questions, images, end = [first], len(first.images), loop.time() + self._wait
        while images < self._most:
            try:
                if self._questions.empty():
                    following = await asyncio.wait_for(self._questions.get(), end - loop.time())
                else:
                    following = self._questions.get_nowait()
            except TimeoutError:
                break
            if following.answered.done():
                continue
            if images + len(following.images) > self._most:
                self._left_over = following
                break
            questions.append(following)
            images += len(following.images)
        return questions


def _fail(questions: Sequence[Question], error: Exception) -> None:
    for question in questions:
        if not question.answered.done():
            question.answered.set_exception(error)
