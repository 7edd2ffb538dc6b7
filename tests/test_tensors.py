# SPDX-License-Identifier: Apache-2.0
"""Decompositions of small matrices: results and threads."""

from __future__ import annotations

import pytest
import torch

from onea import tensors
from onea.serve.workers import Batcher


@pytest.fixture
def two_threads():
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


@pytest.mark.parametrize("shape", [(3, 5, 8), (3, 8, 5), (6, 6)])
def test_decompositions_reconstruct_the_matrices(shape, two_threads):
    matrices = torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    left, spectrum, right = tensors.svd(matrices)
    torch.testing.assert_close(left * spectrum[..., None, :] @ right, matrices)
    gram = matrices @ matrices.mT
    values, vectors = tensors.eigh(gram)
    torch.testing.assert_close(vectors * values[..., None, :] @ vectors.mT, gram)
    assert torch.get_num_threads() == 2


def test_threads_are_restored_after_an_error(two_threads):
    with pytest.raises(torch.linalg.LinAlgError):
        tensors.eigh(torch.full((4, 4), torch.nan))
    assert torch.get_num_threads() == 2


def test_small_matrices_use_one_thread_and_large_ones_all(two_threads, monkeypatch):
    seen = []
    plain = torch.linalg.eigh
    monkeypatch.setattr(torch.linalg, "eigh", lambda m: (seen.append(torch.get_num_threads()), plain(m))[1])
    for side in (tensors._SMALL_SIDE, tensors._SMALL_SIDE + 1):
        tensors.eigh(torch.eye(side))
    assert seen == [1, 2]


def test_a_thread_that_starts_during_a_decomposition_keeps_its_thread_count(two_threads):
    batcher = Batcher(lambda: pytest.fail("nobody asks"), batch_size=1, wait=0)
    with tensors._single_thread_if_small(torch.eye(2)):
        during = batcher._thread.submit(torch.get_num_threads).result()
    assert during == 2
    assert batcher._thread.submit(torch.get_num_threads).result() == 2
