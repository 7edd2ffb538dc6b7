# SPDX-License-Identifier: Apache-2.0
"""Groups of similar images within a class, and series: photos that were probably taken in the same session."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from onea.classifiers.statistics import ClassStatistics, inverse_sqrt, shrunk_covariance
from onea.tensors import eigh, row_blocks, rows_of_each

MAX_GROUPS = 6  # of a class
_MIN_COSINE = 0.3  # of two deviations in one series; with 10 or 80 classes of Grocery, half as many series or fewer
_CHANCE = 4.0  # standard deviations; cosines of random directions have mean 0 and deviation 1 / sqrt(width)
_COSINE_STEP = 0.05  # by which the threshold rises while one series has most of a class
_MAX_COSINE = 0.95  # beyond which the threshold does not rise
_PARTS = 5  # parts of the classes; each one is whitened by the scatter of all others


def similar_groups(features: Tensor, max_groups: int = MAX_GROUPS) -> Tensor:
    """The group of each of a class's images, ``int64 [N]``: its nearest centre by cosine similarity.

    The centres are images found by farthest-first traversal, in time linear in the number of images: first the image
    least similar to the mean, then always the one least similar to all centres.

    >>> similar_groups(torch.tensor([[9.0, 0.0], [0.0, 9.0], [9.1, 0.1], [9.0, 0.2]]), max_groups=2).tolist()
    [1, 0, 1, 1]
    """
    unit = F.normalize(features.double() - features.double().mean(0), dim=1)
    nearest = unit @ unit[(unit @ unit.mean(0)).argmin()]
    groups = torch.zeros(len(unit), dtype=torch.int64)
    for number in range(1, min(max_groups, len(unit))):
        similarity = unit @ unit[nearest.argmin()]
        groups[similarity > nearest] = number
        nearest = nearest.maximum(similarity)
    return _consecutive(groups)  # where images are equal, a group may be empty


def groups_by_class(features: Tensor, rows: Tensor, max_groups: int) -> Tensor:
    """The group of each image, ``int64 [N]``: at most ``max_groups`` for each class.

    If all images of a class are in one group, each becomes a separate group, so that the class can be evaluated.
    """
    groups, start = torch.empty_like(rows), 0
    for _, members in rows_of_each(rows):
        numbers = similar_groups(features[members], max_groups)
        groups[members] = start + (numbers if int(numbers.max()) else torch.arange(len(members)))
        start += len(members)
    return groups


def find_series(features: Tensor, rows: Tensor, known: ClassStatistics) -> Tensor:
    """The series of each image, ``int64 [N]``, numbered within its class.

    Two images of a class belong to one series if they deviate from the mean of their class in nearly the same
    direction. Series are connected components: an image that is similar to any member belongs to the series.

    Deviations are whitened by the covariance within the *other* classes. If it were estimated from the images
    themselves, and these were few, all their deviations would be orthogonal.

    Args:
        features: features of the images, ``[N, width]``.
        rows: classes of the images.
        known: statistics of other images, all of which count as other classes.
    """
    features, series = features.double(), torch.zeros_like(rows)
    members = [positions for _, positions in rows_of_each(rows)]
    deviations = [features[positions] - features[positions].mean(0) for positions in members]
    parts, threshold = min(_PARTS, len(members)), max(_MIN_COSINE, _CHANCE / features.shape[1] ** 0.5)
    no_scatter = torch.zeros(features.shape[1], features.shape[1], dtype=features.dtype)
    scatter_of_known = no_scatter if known.scatter is None else known.scatter.to(features)
    by_part = [torch.cat(deviations[part::parts]) for part in range(parts)]
    scatters = [part.T @ part for part in by_part]
    freedom = [len(by_part[part]) - len(members[part::parts]) for part in range(parts)]
    for part in range(parts):
        scatter = sum(scatters[:part] + scatters[part + 1 :], start=scatter_of_known)
        degrees_of_freedom = known.degrees_of_freedom + sum(freedom) - freedom[part]
        root = inverse_sqrt(*eigh(shrunk_covariance(scatter, degrees_of_freedom)))
        for positions, of_class in zip(members[part::parts], deviations[part::parts], strict=True):
            series[positions] = _series_of_a_class(F.normalize(of_class @ root, dim=1), threshold)
    return series


def _series_of_a_class(directions: Tensor, threshold: float) -> Tensor:
    """The series of each image of a class; the threshold rises while one series has more than half of the images.

    Without most of its images, a class could not be evaluated.
    """
    series = _connected_components(directions, threshold)
    while threshold < _MAX_COSINE and 2 * int(torch.bincount(series).max()) > max(2, len(series)):
        threshold += _COSINE_STEP
        series = _connected_components(directions, threshold)
    return series


def _connected_components(directions: Tensor, threshold: float) -> Tensor:
    """The component of each of these unit vectors, ``int64 [N]``; an edge is a cosine above the threshold.

    Blocks of rows are compared with later rows outside their component, so memory grows with the number of images and
    not with its square.

    >>> _connected_components(torch.tensor([[1.0, 0.0], [0.0, 1.0], [0.8, 0.6]]), 0.7).tolist()
    [0, 1, 0]
    """
    component = torch.arange(len(directions))  # the position of its first image
    for rows in row_blocks(len(directions), len(directions)):
        of_rows, others = component[rows], torch.arange(rows.start, len(directions))
        if bool((of_rows == of_rows[0]).all()):
            others = others[component[others] != of_rows[0]]
        edges = directions[rows] @ directions[others].T > threshold
        for row in (edges & (of_rows[:, None] != component[others])).any(1).nonzero()[:, 0].tolist():
            joined = torch.zeros(len(directions), dtype=torch.bool)
            joined[component[others[edges[row]]]] = True
            joined[component[rows.start + row]] = True
            if int(joined.sum()) > 1:
                component[joined[component]] = int(joined.byte().argmax())
    return _consecutive(component)


def _consecutive(numbers: Tensor) -> Tensor:
    consecutive: Tensor = numbers.unique(return_inverse=True)[1]
    return consecutive
