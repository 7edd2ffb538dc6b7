# SPDX-License-Identifier: Apache-2.0
"""Which images of a class resemble each other, as photos taken in series do."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from onea.classifiers.statistics import ClassStatistics, inverse_sqrt, shrunk_covariance
from onea.tensors import row_blocks

GROUPS = 6  # of a class, at most
_ALIKE = 0.3  # cosine of two deviations; with 10 classes or 80, photos of Grocery form half as many series or fewer
_CHANCE = 4.0  # deviations: cosines of random directions, of mean 0 and deviation 1 / sqrt(width), hardly exceed it
_STEP, _SAME = 0.05, 0.95  # by which it grows where too many are alike, and where it ends
_PARTS = 5  # of the classes, each compared by the spread of all others


def similar_groups(features: Tensor, most: int = GROUPS) -> Tensor:
    """The group of each of a class's images, ``int64 [N]``: each belongs to the nearest of a few that are far apart.

    Those few are found one by one: first the image least like the others, then always the one that is least like
    everything found so far (farthest-first traversal, in time proportional to the images).

    >>> similar_groups(torch.tensor([[9.0, 0.0], [0.0, 9.0], [9.1, 0.1], [9.0, 0.2]]), most=2).tolist()
    [1, 0, 1, 1]
    """
    unit = F.normalize(features.double() - features.double().mean(0), dim=1)
    nearest = unit @ unit[(unit @ unit.mean(0)).argmin()]
    groups = torch.zeros(len(unit), dtype=torch.int64)
    for number in range(1, min(most, len(unit))):
        similarity = unit @ unit[nearest.argmin()]
        groups[similarity > nearest] = number
        nearest = nearest.maximum(similarity)
    compact: Tensor = groups.unique(return_inverse=True)[1]  # where images are equal, a number may have no member
    return compact


def groups_by_class(features: Tensor, rows: Tensor, most: int) -> Tensor:
    """The group of each image, ``int64 [N]``: at most so many of a class, and no number for two classes.

    Where all images of a class are alike, each is a group of its own, because a class cannot be judged without images.
    """
    groups, start = torch.empty_like(rows), 0
    for row in rows.unique():
        own = (rows == row).nonzero()[:, 0]
        found = similar_groups(features[own], most)
        groups[own] = start + (found if int(found.max()) else torch.arange(len(own)))
        start += len(own)
    return groups


def series(features: Tensor, rows: Tensor, known: ClassStatistics) -> Tensor:
    """The series of each image, ``int64 [N]``, numbered within its class: images that were taken one after the other.

    Two images of a class belong to one series if they deviate from the mean of their class in nearly the same
    direction. An image like any member of a series belongs to it. An image like no other is a series of its own.

    Directions are compared where images of *other* classes spread alike in all of them. Measured by their own spread,
    the deviations of few images are all at right angles, and none would be like another.

    Args:
        features: ``[N, width]``.
        rows: their classes.
        known: statistics without these images, whose classes count as others, too.
    """
    exact, classes, numbers = features.double(), rows.unique(), torch.zeros_like(rows)
    apart = torch.cat([exact[:0], *(exact[rows == row] - exact[rows == row].mean(0) for row in classes)])
    place = torch.cat([rows[:0], *((rows == row).nonzero()[:, 0] for row in classes)])
    scatter = torch.zeros_like(exact.T @ exact) if known.scatter is None else known.scatter.to(exact)
    parts, least = min(_PARTS, len(classes)), max(_ALIKE, _CHANCE / features.shape[1] ** 0.5)
    for part in range(parts):
        mine = classes[part::parts]
        own = torch.isin(rows[place], mine)
        others = apart[~own]
        freedom = known.freedom + len(others) - (len(classes) - len(mine))
        root = inverse_sqrt(shrunk_covariance(scatter + others.T @ others, freedom))
        for row in mine:
            members = rows[place] == row
            alike = F.normalize(apart[members] @ root, dim=1)
            numbers[place[members]] = _series_of_a_class(alike, least)
    return numbers


def _series_of_a_class(directions: Tensor, least: float) -> Tensor:
    """The series of each image of a class; where one has more than half of them, images must be more alike.

    Without most of its images, nobody could judge a class.
    """
    found = _joined(directions, least)
    while least < _SAME and 2 * int(torch.bincount(found).max()) > max(2, len(found)):
        least += _STEP
        found = _joined(directions, least)
    return found


def _joined(directions: Tensor, least: float) -> Tensor:
    """The series of each of these unit vectors, ``int64 [N]``: those whose cosine is larger are of one.

    Some rows at a time are compared with those behind them, and not with their own series, so that memory grows with
    the number of images and not with its square.

    >>> _joined(torch.tensor([[1.0, 0.0], [0.0, 1.0], [0.8, 0.6]]), 0.7).tolist()
    [0, 1, 0]
    """
    numbers = torch.arange(len(directions))  # of a series, that of its first image
    for rows in row_blocks(len(directions), len(directions)):
        own, others = numbers[rows], torch.arange(rows.start, len(directions))
        if bool((own == own[0]).all()):
            others = others[numbers[others] != own[0]]
        alike = directions[rows] @ directions[others].T > least
        for row in (alike & (own[:, None] != numbers[others])).any(1).nonzero()[:, 0].tolist():
            met = torch.zeros(len(directions), dtype=torch.bool)
            met[numbers[others[alike[row]]]] = True
            met[numbers[rows.start + row]] = True
            if int(met.sum()) > 1:
                numbers[met[numbers]] = int(met.byte().argmax())
    compact: Tensor = numbers.unique(return_inverse=True)[1]
    return compact
