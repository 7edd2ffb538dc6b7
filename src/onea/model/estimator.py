# SPDX-License-Identifier: Apache-2.0
"""``onea.OneA``: an estimator that learns new classes in updates, predicts, and is saved and loaded."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from onea.data.file_checks import OnBad
from onea.errors import OneaError, did_you_mean
from onea.learner.merged_adapter import MergingOptions
from onea.model.engine import Engine, locate_backbone
from onea.model.learning.background import learn_background
from onea.model.learning.images import read_labelled, read_unlabelled
from onea.model.learning.refresh import RefreshReport, refresh
from onea.model.learning.update import UpdateSettings, initial_state, learn
from onea.model.learning.update_images import has_integer_labels
from onea.model.names import check_integer_labels
from onea.model.parameters import (
    FIXED,
    NETWORK,
    OPTIONS,
    Parameters,
    change_options,
    check_params,
    choose_image_size,
    choose_options,
    option_params,
    to_python,
)
from onea.model.reports import PhotoReport
from onea.model.state import State
from onea.model.storage.folder import StoredVersions, read_current, save
from onea.model.versions import VersionedModel, Versions
from onea.runtime import NO_PROGRESS, Progress
from onea.vit.network_config import NetworkConfig


@dataclass(kw_only=True, eq=False, repr=False)
class OneA(VersionedModel, Parameters):
    """An image classifier that learns new classes in updates of any size.

    It is a scikit-learn estimator, for cross-validation, searches and pipelines. Labels are strings or integers;
    predictions have the same type, or text if any class is named by text. An update prepares the next version
    separately and then replaces the old one at once, so other threads can predict meanwhile, with the old version.

    >>> import numpy as np, onea
    >>> rng = np.random.default_rng(0)
    >>> dark, light = (rng.integers(low, low + 90, (6, 40, 40, 3), dtype=np.uint8) for low in (0, 160))
    >>> model = onea.OneA(image_size=56, epochs=1, precision="fp32", threads=1)
    >>> model.learn(np.concatenate([dark, light]), ["dark"] * 6 + ["light"] * 6).predict(light[:2]).tolist()
    ['light', 'light']
    >>> model.partial_fit(dark[:3] // 2 + 60, ["grey"] * 3).classes_.tolist()  # one more class, in seconds
    ['dark', 'grey', 'light']
    >>> model.predict_proba(light[:2]).shape, model.transform(light[:2]).shape, len(model.predict_topk(light, k=2))
    ((2, 3), (2, 384), 6)
    >>> model.score(light, ["light"] * 6) == float((model.familiarity(light) >= model.threshold_).mean())
    True
    >>> model.rename("grey", "gray").forget("gray").version, len(model.history), model.last_report.skipped
    (4, 4, ())
    >>> model.undo().undo().undo().version, model.evaluate(dark, ["dark"] * 6).accuracy
    (1, 1.0)
    >>> model.set_params(unknown=0).get_params()["unknown"], model.snapshot().version, model.versions.kept
    (0, 1, (1,))
    >>> model.learn_background(rng.integers(0, 255, (4, 40, 40, 3), dtype=np.uint8)).version  # none of the classes
    5
    >>> model.refresh(np.concatenate([dark, light])).photos  # train once more on photos that were taught
    12
    >>> model.fit(light, ["light"] * 6).classes_.tolist(), model.fit_transform(dark, ["dark"] * 6).shape  # replaces all
    (['light'], (6, 384))

    Args:
        backbone: the bundled network (``vit_small_patch14_dinov2``), a timm ``architecture.tag`` name or a
            ``.safetensors`` file.
        depth: the number of blocks of the network to use; 0 uses all.
        image_size: side in pixels of the input of the network, a multiple of its patch size (14 pixels if bundled); by
            default 168 for the bundled network, and the side that it was trained on for any other.
        unknown: fraction of images of known classes that may be predicted as ``unknown`` (-1 if classes are numbers);
            with 0 or None, ``unknown`` is never predicted.
        held_out: fraction of the images of each new class that is used for calibration instead of training.
        keep: the number of earlier versions for ``undo``.
        preset: time against accuracy: ``auto`` (One-A+ in the upper blocks, on half of the patches, two epochs for an
            update of ten classes), ``fast`` (no training, one forward pass per image: half of the time), ``accurate``
            (as ``auto``, on images of 224 pixels if the network is the bundled one: twice the time) or ``paper``
            (One-A, as published).
        epochs: number of epochs for an update of ten classes; fewer for smaller updates, more for larger ones. If None,
            that of the preset.
        learning_rate: peak learning rate; if None, that of the preset.
        batch_size: images per training step; if None, that of the preset.
        rank: width of the adapter; if None, that of the preset.
        single_class: whether an update of one class trains the adapter: ``skip`` (only its statistics are computed, in
            seconds) or ``train``.
        readout: the classifier: ``rgda`` (the likelihood of a Gaussian per class), ``slda`` (of Gaussians with one
            covariance), ``whitened`` (cosine to the prototypes, with features whitened by the pooled within-class
            covariance), ``ncm`` (cosine to the prototypes, as in the paper) or another that
            ``onea methods --classifiers`` lists.
        views: the number of views of an image in the statistics of its class: the whole image, then random crops. If
            None, that of the preset: 1 with ``fast``; with ``auto`` and ``accurate`` 2, or 1 in an update with 50 or
            more images per class on average. The paper has 1.
        follow_drift: whether the statistics of old classes are updated when the adapter changes (in the paper: no).
        memory: the number of photos of each class that the model keeps as small copies for later trainings; ``pending``
            keeps those of classes that no adapter was trained on, until the next training. 0 keeps none. With memory,
            an update also trains if the classes that no adapter was trained on are a fifth of all.
        memory_mb: the largest number of megabytes of all small copies; with more, fewer of each class are kept.
        mirror: whether training images may be flipped horizontally.
        options: any further options of One-A+, as ``onea methods one-a-plus`` lists them (of One-A with the paper's
            preset). Models have ``min_share=0.5``: an update trains the adapter if it has at least as many classes as
            the adapter was trained on before; any other update computes statistics only, in seconds.
        device: ``auto``, ``cpu``, ``cuda``, ...
        precision: precision of training and of random crops: ``auto``, ``bf16``, ``fp32`` or ``fp8`` (training steps
            only). Predictions are always computed in fp32.
        threads: number of CPU threads; 0 uses all.
        verbose: whether a terminal or a notebook shows a progress bar for updates and predictions of many images.
        seed: seed of all random numbers.
    """

    def __post_init__(self) -> None:
        super().__post_init__()
        self._engine: Engine | None = None
        self._preprocess: Mapping[str, Any] | None = None  # this and the next three are set by load
        self._config: Mapping[str, Any] | None = None
        self._loaded_options: MergingOptions | None = None
        self._depth: int | None = None
        self._last_report = PhotoReport()

    # scikit-learn's conventions

    def set_params(self, **params: Any) -> OneA:
        """Change parameters; those of the network, the classifier and the training are fixed by the first update."""
        names = self.defaults().keys()
        for name, value in params.items():
            if name not in names:
                raise OneaError(f"Unknown parameter '{name}'; {did_you_mean(name, names)}")
            if self._snapshot and name in FIXED and value not in self._allowed_values(name):
                raise OneaError(f"{name} cannot change after the model was taught; create a new OneA({name}=...).")
        if self._snapshot:  # before that, scikit-learn expects errors from fit
            check_params(self.get_params() | params)
            check_integer_labels(self._snapshot.classes, self._snapshot.state.integer_labels, params.get("unknown"))
        with self._lock:
            for name, value in params.items():
                setattr(self, name, value)
            if params.keys() & {"device", "precision", "threads", "preset", *NETWORK}:
                self._engine = None
            if self._snapshot:
                self._set_current(self._snapshot.state)
        return self

    def __sklearn_tags__(self) -> Any:
        from onea.model.scikit_learn import tags

        return tags()

    def __getstate__(self) -> dict[str, Any]:
        if self._snapshot is not None:
            raise OneaError("A taught model cannot be pickled; use save(path) and onea.load(path).")
        return self.get_params()  # so that other processes can fit it

    def __setstate__(self, params: dict[str, Any]) -> None:
        self.__init__(**params)  # type: ignore[misc]

    # learning

    @property
    def last_report(self) -> PhotoReport:
        """Names of skipped photos, conflicts and ignored files of this object's last update; never saved."""
        return self._last_report

    def fit(self, X: Any, y: Any = None) -> OneA:
        """Replace all classes by these; a loaded model uses the options that it was saved with."""
        with self._without_classes():
            return self.learn(X, y)

    def fit_transform(self, X: Any, y: Any = None) -> npt.NDArray[np.float32]:
        """``fit``, then the features of the same images."""
        return self.fit(X, y).transform(X)

    def learn(
        self,
        images: Any,
        labels: Any = None,
        *,
        name: str | None = None,
        later: bool = False,
        progress: Progress | bool | None = None,
        on_bad: OnBad = "fail",
    ) -> OneA:
        """Learn new classes, or more images of known ones, in one update; all other classes are kept.

        Images of a known class are added to it. In the merge, the class is counted once, divided between the earlier
        adapter and the new one by the number of its images in each. An image that was taught before as the same class,
        or is a duplicate, is counted once.

        Args:
            images: a folder with one folder of images for each class; a Hugging Face dataset or a loader of
                ``(images, labels)``; or paths, Pillow images, arrays or tensors, with ``labels``.
            labels: the class of each image, if ``images`` has none.
            name: name of the update in the history.
            later: whether to train the adapter later, with ``refresh``; then the update takes seconds.
            progress: callbacks for the progress, or whether to show a progress bar; by default ``verbose``.
            on_bad: ``fail`` or ``skip`` images that cannot be read.

        Raises:
            OneaError: the images or labels are invalid, or training failed; the model is unchanged.
        """
        started = time.perf_counter()
        with self._lock, self._learning_progress(progress) as reporter:
            check_params(self.get_params())
            engine = self._load_engine()
            state = (
                self._snapshot.state
                if self._snapshot
                else initial_state(engine, self._merging_options(engine), self.readout)
            )
            reporter.start_phase("reading images")
            batch = read_labelled(images, labels, engine.side, on_bad)
            check_integer_labels(
                [*state.classes, *(batch.labels or ())], has_integer_labels(state, batch), self.unknown
            )
            learned, report = learn(
                engine,
                state,
                batch,
                version=self._versions.next,
                name=name,
                settings=UpdateSettings.from_params(self.get_params()),
                later=later,
                progress=reporter,
                started=started,
            )
            self._commit(learned)
            self._last_report = report
        return self

    def refresh(
        self, images: Any = None, *, progress: Progress | bool | None = None, on_bad: OnBad = "skip"
    ) -> RefreshReport:
        """Train the adapter once more on all photos at hand: stored copies, and those of ``images`` that were taught.

        After many small updates this makes a model more accurate. Photos are recognised by their fingerprints and need
        no labels; photos that were never taught are not used. The new version is kept if its accuracy on the same
        held-out photos is at least as high.

        Args:
            images: images as for ``predict``, such as a folder with all photos; None uses the stored copies alone.
            progress: callbacks for the progress, or whether to show a progress bar; by default ``verbose``.
            on_bad: ``fail`` or ``skip`` images that cannot be read.

        Raises:
            OneaError: photos of fewer than two classes are at hand, or training failed; the model is unchanged.
        """
        started = time.perf_counter()
        with self._lock, self._learning_progress(progress) as reporter:
            snapshot = self.snapshot()
            reporter.start_phase("reading images")
            photos = None if images is None else read_unlabelled(images, snapshot.side, on_bad)
            state, report = refresh(
                self._load_engine(),
                snapshot.state,
                photos,
                version=self._versions.next,
                settings=UpdateSettings.from_params(self.get_params()),
                progress=reporter,
                started=started,
            )
            if state is not None:
                self._commit(state)
            self._last_report = PhotoReport(photos.skipped if photos else ())
        return report

    def learn_background(
        self, images: Any, *, name: str | None = None, progress: Progress | bool | None = None, on_bad: OnBad = "fail"
    ) -> OneA:
        """Learn background images in one update, so that similar images are predicted ``unknown``; no class changes.

        Background images show none of the classes. An image that is nearer to one of them than to any class becomes
        less familiar. Features of a random sample of all background images are stored.

        Args:
            images: images as for ``predict``.
            name: name of the update in the history.
            progress: callbacks for the progress, or whether to show a progress bar; by default ``verbose``.
            on_bad: ``fail`` or ``skip`` images that cannot be read.

        Raises:
            OneaError: the model has no class yet, or many of the images clearly show one; the model is unchanged.
        """
        started = time.perf_counter()
        with self._lock, self._learning_progress(progress) as reporter:
            snapshot = self.snapshot()
            reporter.start_phase("reading images")
            batch = read_unlabelled(images, snapshot.side, on_bad)
            reporter.start_phase("computing features")
            version = self._versions.next
            self._commit(learn_background(snapshot, batch, version=version, name=name, seed=self.seed, started=started))
            self._last_report = PhotoReport(batch.skipped)
        return self

    def partial_fit(self, X: Any, y: Any = None, classes: Any = None) -> OneA:
        """``learn`` under scikit-learn's name; ``classes`` is ignored, because classes need not be known in advance."""
        return self.learn(X, y)

    # disk

    def save(self, path: str | Path) -> Path:
        """Write or update the model folder, atomically."""
        return save(self, Path(path))

    def push_to_hub(
        self, repo: str, *, private: bool | None = None, token: str | None = None, copies: bool = False
    ) -> str:
        """Upload the current version to the Hugging Face Hub (``owner/name``); returns its address.

        Stored copies of photos are uploaded only with ``copies=True``.
        """
        from onea.model.storage.hub import push

        return push(self, repo, private=private, token=token, copies=copies)

    @classmethod
    def from_pretrained(
        cls, name: str, *, revision: str | None = None, token: str | None = None, **params: Any
    ) -> OneA:
        """The model in a repository of the Hugging Face Hub (``owner/name``) or in a local folder."""
        from onea.model.storage.hub import fetch

        with fetch(name, revision=revision, token=token) as folder:
            model = load(folder, **params)
            for version in model.versions.kept:  # read them now, because the folder may be temporary
                model.state(version)
            return model

    def restore(
        self, current: State, versions: Versions, stored: StoredVersions | None = None, **overrides: Any
    ) -> None:
        """Set the state to a saved model; ``overrides`` are the parameters that replace saved ones."""
        self._preprocess, self._depth = current.preprocess, current.backbone.get("depth", 0)
        self._config = current.backbone.get("config") or NetworkConfig().to_json()
        engine = self._load_engine()
        engine.check_backbone(current.backbone)
        super().restore(current, versions, stored)
        if "preset" not in overrides:  # otherwise fit() uses the preset's options
            self._loaded_options = change_options(current.options, option_params(overrides), engine.vit)

    # helpers

    def _allowed_values(self, name: str) -> list[Any]:
        """The values that a fixed parameter may be set to: its current one, or the preset's if that is None."""
        assert self._snapshot is not None
        options = self._snapshot.state.options
        return [getattr(self, name), *([options[name]] if name in OPTIONS and name in options else [])]

    def _merging_options(self, engine: Engine) -> MergingOptions:
        if self._loaded_options is not None:
            return self._loaded_options
        return choose_options(self.preset, option_params(self.get_params()), engine.vit)

    def _learning_progress(self, progress: Progress | bool | None) -> contextlib.AbstractContextManager[Progress]:
        if isinstance(progress, Progress):
            return contextlib.nullcontext(progress)
        if not (self.verbose if progress is None else progress):
            return contextlib.nullcontext(NO_PROGRESS)
        from onea.model.progress_bar import LearningBar

        return LearningBar()

    def _load_engine(self) -> Engine:
        with self._lock:
            if self._engine is None:
                runtime = self.device, self.precision, self.threads
                depth = to_python(self.depth) if self._depth is None else self._depth
                inputs = self._preprocess, choose_image_size(self.get_params()), self._config
                self._engine = Engine(self.backbone, *runtime, to_python(self.mirror), *inputs, depth=depth)
            return self._engine


def load(path: str | Path, **params: Any) -> OneA:
    """Load the model in a folder.

    >>> import numpy as np, tempfile
    >>> photos = np.random.default_rng(0).integers(0, 255, (6, 40, 40, 3), dtype=np.uint8)
    >>> folder = OneA(image_size=56, threads=1).learn(photos, ["noise"] * 6).save(f"{tempfile.mkdtemp()}/shop.onea")
    >>> load(folder, threads=1).classes_.tolist()
    ['noise']

    Args:
        path: a folder that ``save`` or ``onea teach`` created.
        params: parameters of ``OneA`` that replace the saved ones, such as ``device="cuda"``.

    Raises:
        OneaError: the folder has no model, the model is damaged or of another format, or its backbone is missing.
    """
    folder = Path(path)
    manifest, current = read_current(folder)
    network = {} if "backbone" in params else {"backbone": locate_backbone(current.backbone, folder)}
    model = OneA(**(manifest.params | network | params))
    check_params(Parameters.defaults() | params)
    model.restore(current, manifest.versions, StoredVersions(folder.absolute()), **params)
    return model


def load_for(path: Path, **params: Any) -> OneA:
    """``load``, ignoring parameters that are None; refuse a rate of ``unknown`` that cannot be guaranteed."""
    model = load(path, **{name: value for name, value in params.items() if value is not None})
    if params.get("unknown"):
        model.snapshot().check_unknown_rate(params["unknown"])
    return model
