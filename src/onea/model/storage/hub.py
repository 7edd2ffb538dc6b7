# SPDX-License-Identifier: Apache-2.0
"""Models on the Hugging Face Hub: the model folder with the current version only.

Only model files are downloaded, and validated like those of any other folder.
"""

from __future__ import annotations

import dataclasses
import shutil
import tempfile
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from onea.errors import OneaError
from onea.model.storage.folder import Manifest, model_params, write
from onea.model.storage.layout import MODEL_FILES, holds_model
from onea.model.versions import Versions
from onea.vit.network_config import licence_terms

if TYPE_CHECKING:
    from onea.model.estimator import OneA


def push(model: OneA, repo: str, *, private: bool | None = None, token: str | None = None, copies: bool = False) -> str:
    """Upload the current version, and create the repository if necessary; return its address.

    Stored copies of photos are uploaded only with ``copies``.

    Warns if the licence of the network's weights has terms for models made with them.
    """
    import huggingface_hub

    state = model.snapshot().state
    state = state if copies else dataclasses.replace(state, exemplars={})
    if (licence := state.backbone.get("licence")) and (terms := licence_terms(licence)):
        warnings.warn(f"The model was made with weights licensed under {licence}. {terms}", stacklevel=3)
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary) / f"{repo.split('/')[-1].removesuffix('.onea')}.onea"
        write(
            folder,
            state,
            Manifest(Versions((state.version,), model.versions.counter), model_params(model)),
            [state],
        )
        try:
            huggingface_hub.create_repo(repo, private=private, token=token, exist_ok=True)
            url: Any = huggingface_hub.upload_folder(
                repo_id=repo, folder_path=folder, token=token, commit_message=f"Version {state.version}"
            )
        except (OSError, ValueError, huggingface_hub.errors.HfHubHTTPError) as error:
            raise _transfer_error(repo, "uploaded", error) from error
    return str(url)


@contextmanager
def fetch(name: str, *, revision: str | None = None, token: str | None = None) -> Iterator[Path]:
    """The model folder at a local path, or a temporary copy of one in a repository of the Hub."""
    import huggingface_hub

    if revision is None and holds_model(Path(name)):
        yield Path(name)
        return
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary) / f"{name.split('/')[-1].removesuffix('.onea')}.onea"
        try:
            cached = huggingface_hub.snapshot_download(
                name, revision=revision, token=token, allow_patterns=list(MODEL_FILES)
            )
            _copy(Path(cached), folder)
        except (OSError, ValueError, huggingface_hub.errors.HfHubHTTPError) as error:
            raise _transfer_error(name, "downloaded", error) from error
        yield folder


def _copy(cached: Path, folder: Path) -> None:
    """Copy the files of a model from the cache of the Hub, which contains links; a model folder must not."""
    folder.mkdir()
    for file in (file for pattern in MODEL_FILES for file in cached.glob(pattern)):
        target = folder / file.relative_to(cached)
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(file, target)


def _transfer_error(name: str, action: str, error: Exception) -> OneaError:
    lines = str(error).strip().splitlines()
    reason = (lines[0] if lines else type(error).__name__).rstrip(".:")
    return OneaError(f"{name} could not be {action} ({reason}); check its name, your token and the network.")
