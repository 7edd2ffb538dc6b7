# SPDX-License-Identifier: Apache-2.0
"""Exports: a file is kept only if it predicts like the model, for any batch."""

from __future__ import annotations

import contextlib
import dataclasses
import io
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from support import ROOT
from support.models import onnx_runtime_or_skip, tiny_model
from support.pages import blocks

from onea.classifiers.gaussian import MANY_CLASSES
from onea.errors import OneaError
from onea.model import export as exporting
from onea.model.answers import Snapshot
from onea.model.export import Graph, export
from onea.model.learning.images import DecodedImages
from onea.research.bench.scale import grow
from onea.vit.onnx import OPSET


@pytest.fixture(scope="module")
def estimator(tiny_vit, tiny_images):
    return tiny_model(tiny_vit).learn(tiny_images / "train")


@pytest.fixture(scope="module")
def model(estimator):
    return estimator.snapshot()


@pytest.fixture(scope="module")
def thousand(model):
    rng = np.random.default_rng(0)
    pixels = rng.integers(0, 256, (1000, 3, model.side, model.side), dtype=np.uint8)
    return DecodedImages(pixels, None, tuple(map(str, range(1000))))


def test_the_graph_predicts_like_the_model(model, thousand):
    probabilities, none = Graph(model)(torch.from_numpy(thousand.pixels).float() / 255)
    np.testing.assert_allclose(probabilities.detach().numpy(), model.predict_proba(thousand), atol=1e-4)
    answers = model.answers(thousand)
    np.testing.assert_allclose(none.detach().numpy(), [answer.none for answer in answers], atol=1e-4)
    margins = model.compute_scores(thousand).familiarity
    clear = (margins - model.threshold).abs() > 1e-4  # nearer to the threshold, rounding decides
    assert clear.float().mean() > 0.9
    assert torch.equal((none > 0.5)[clear], (margins < model.threshold)[clear])
    assert (margins < model.threshold).tolist() == [answer.verdict == "unknown" for answer in answers]


def test_a_graph_of_very_many_classes_computes_all_covariances(model, thousand):
    """The model computes those of a shortlist for each photo."""
    many = Snapshot(model.engine, grow(model.state, MANY_CLASSES + 20), unknown_rate=0.05)
    photos = dataclasses.replace(thousand, pixels=thousand.pixels[:50], names=thousand.names[:50])
    probabilities, _ = Graph(many)(torch.from_numpy(photos.pixels).float() / 255)
    assert probabilities.shape == (50, MANY_CLASSES + 20)
    np.testing.assert_allclose(probabilities.detach().numpy(), many.predict_proba(photos), atol=1e-3)


@pytest.fixture(scope="module")
def exported(model, tmp_path_factory):
    onnx_runtime_or_skip()
    return export(model, "onnx", tmp_path_factory.mktemp("exported") / "shop.onnx")


def session_of(path):
    return onnx_runtime_or_skip().InferenceSession(path, providers=["CPUExecutionProvider"])


def same(found, wanted):
    """Probabilities agree to 1e-3, and the best class is the same unless there is a tie."""
    np.testing.assert_allclose(found, wanted, atol=1e-3)
    best = np.sort(wanted, axis=1)
    ties = best[:, -1] - best[:, -2] < 1e-3
    assert ties.mean() < 0.1
    assert (found.argmax(1) == wanted.argmax(1))[~ties].all()


def test_onnx_predicts_like_the_model_on_a_thousand_images(model, thousand, exported):
    assert exported.difference <= 1e-3
    session, pixels = session_of(exported.path), thousand.pixels.transpose(0, 2, 3, 1)
    parts = [session.run(["probabilities"], {"images": part})[0] for part in np.split(pixels, [1, 8, 300])]
    same(np.concatenate(parts), model.predict_proba(thousand))
    written = pytest.importorskip("onnx").load(exported.path)
    assert {entry.domain: entry.version for entry in written.opset_import} == {"": OPSET}
    props = {entry.key: json.loads(entry.value) for entry in written.metadata_props}
    facts = json.loads(exported.description.read_text())
    assert props["classes"] == facts["classes"] == list(model.classes)
    assert facts["version"] == model.version
    assert facts["side"] == props["side"] == model.side


def test_photos_of_any_shape_are_resized_as_pillow_resizes_them(model):
    """The part of the graph before the network, compared pixel by pixel."""
    onnx, runtime = pytest.importorskip("onnx"), onnx_runtime_or_skip()
    from onea.data.decode import fit
    from onea.vit.onnx import prepend_resize

    side, random = 32, np.random.default_rng(5)
    image = onnx.helper.make_tensor_value_info("images", onnx.TensorProto.FLOAT, ["batch", 3, side, side])
    kept = onnx.helper.make_tensor_value_info("kept", onnx.TensorProto.FLOAT, ["batch", 3, side, side])
    nodes = [onnx.helper.make_node("Identity", ["images"], ["kept"])]
    graph = onnx.helper.make_model(
        onnx.helper.make_graph(nodes, "nothing", [image], [kept]),
        opset_imports=[onnx.helper.make_opsetid("", OPSET)],
        ir_version=8,
    )
    prepend_resize(graph, side)
    session = runtime.InferenceSession(graph.SerializeToString(), providers=["CPUExecutionProvider"])
    shapes = [(1, 1), (2, 300), (300, 7), (31, 33), (32, 32), (33, 32), (32, 35), (77, 131), (131, 77), (65, 129)]
    shapes += [tuple(random.integers(1, 400, 2)) for _ in range(40)]
    for shape in shapes:
        smooth = Image.fromarray(random.integers(0, 256, (5, 6, 3), dtype=np.uint8)).resize(shape[::-1])
        photos = np.stack([np.asarray(smooth), random.integers(0, 256, (*shape, 3), dtype=np.uint8)])
        found = np.rint(255 * session.run(None, {"images": photos})[0]).astype(int)
        wanted = np.stack([fit(Image.fromarray(photo), side, side) for photo in photos]).astype(int)
        np.testing.assert_array_equal(found, wanted, str(shape))


SIZES = [(32, 32), (21, 50), (150, 111), (520, 600)]  # a JPEG is decoded at a half from 128 on, at an eighth from 512


def turned(value):
    exif = Image.Exif()
    exif[0x0112] = value
    return exif


def common_kinds(picture, number, random, saved):
    """One picture in every mode and format that photos have, upright and turned."""
    width, height = picture.size
    alpha = Image.fromarray(random.integers(0, 256, (height, width), dtype=np.uint8))
    with_alpha = picture.copy()
    with_alpha.putalpha(alpha)
    grey = picture.convert("L")
    clear = picture.quantize(16)
    saved(picture, "rgb", "jpg", quality=90)
    saved(picture, "progressive", "jpg", progressive=True)
    saved(picture, "turned", "jpg", exif=turned(1 + number % 8))
    saved(picture, "turned", "png", exif=turned(8 - number % 8))
    saved(picture.convert("CMYK"), "cmyk", "jpg")
    saved(grey, "grey", "jpg")
    saved(picture, "rgb", "png")
    saved(with_alpha, "alpha", "png")
    saved(with_alpha, "alpha", "webp", lossless=True)
    saved(Image.merge("LA", (grey, alpha)), "grey-alpha", "png")
    saved(picture, "rgb", "webp")
    saved(clear, "palette", "png")
    saved(clear, "transparent-palette", "png", transparency=3)
    saved(picture, "transparent-colour", "png", transparency=picture.getpixel((3, 3)))
    saved(clear, "palette", "gif")
    saved(grey.point(lambda level: level > 128, "1"), "two", "png")
    deep = np.asarray(grey, np.uint16) * 257 + random.integers(0, 257, (height, width), dtype=np.uint16)
    saved(Image.fromarray(np.minimum(deep, 65_535).astype(np.uint16)), "deep", "png")
    saved(picture, "turned", "tif", exif=turned(6))


def heic_kinds(picture, number, random, saved):
    """HEIC, the format of photos of iPhones."""
    pytest.importorskip("pillow_heif", reason="HEIC needs the extra pillow-heif").register_heif_opener()
    with_alpha = picture.copy()
    with_alpha.putalpha(Image.fromarray(random.integers(0, 256, picture.size[::-1], dtype=np.uint8)))
    saved(picture, "rgb", "heic", quality=90)
    saved(picture, "turned", "heic", exif=turned(1 + number % 8))
    saved(picture.convert("L"), "grey", "heic")
    saved(with_alpha, "alpha", "heif", quality=90)


def answered_by_the_service(shop, files):
    """Probabilities of every class from the service, which accepts only some formats."""
    serving = pytest.importorskip("support.serving", exc_type=ImportError)
    with serving.client_of(shop) as client:
        known = [one["name"] for one in client.get("/classes").json()["classes"]]
        found = []
        for start in range(0, len(files), 50):
            sent = [("images", (file.name, file.read_bytes())) for file in files[start : start + 50]]
            answers = client.post("/predict?top=100", files=sent).json()["answers"]
            likely = [{one["class"]: one["probability"] for one in answer["top"]} for answer in answers]
            found += [[chances[name] for name in known] for chances in likely]
    return np.array(found)


@pytest.fixture(scope="module")
def shop(estimator, tmp_path_factory):
    return estimator.save(tmp_path_factory.mktemp("saved") / "shop.onea")


@pytest.mark.parametrize(("kinds", "enough"), [(common_kinds, 200), (heic_kinds, 16)])
def test_the_documented_code_predicts_like_the_model_and_the_service(
    model, shop, exported, tiny_images, tmp_path, monkeypatch, kinds, enough
):
    [block] = [block for block in blocks(ROOT / "docs/models.md") if block.how.endswith("test_export.py")]
    assert len([line for line in block.text.splitlines() if line]) <= 13
    first, opened, others = block.text.replace("shop.onnx", str(exported.path)).partition("(photo := ")
    each = compile(opened + others, "docs/models.md", "exec")
    names: dict[str, Any] = {}
    exec(first, names)
    monkeypatch.chdir(tmp_path)
    folder = tmp_path / "photos"
    folder.mkdir()
    random = np.random.default_rng(3)
    sources = [*sorted((tiny_images / "test").glob("*/*")), *sorted((tiny_images / "train").glob("*/0.png"))]
    for number, source in enumerate(sources[:: 2 if kinds is common_kinds else 5]):  # HEIC takes long to write
        with Image.open(source) as image:
            picture = image.convert("RGB").resize(SIZES[number % len(SIZES)], Image.Resampling.BICUBIC)
        kinds(
            picture,
            number,
            random,
            lambda image, kind, ending, **how: image.save(
                folder / f"{len(list(folder.iterdir())):03d}-{kind}.{ending}", **how
            ),
        )
    files = sorted(folder.iterdir())
    assert len(files) >= enough
    probabilities, printed, none = [], [], []
    for file in files:
        Path("photo.jpg").write_bytes(file.read_bytes())
        with contextlib.redirect_stdout(io.StringIO()) as out:
            exec(each, names)
        probabilities.append(names["each"])
        none.append(names["none"])
        printed.append(out.getvalue().rsplit(" ", 2)[0])
    wanted, answers = model.predict_proba(files), model.answers(files)
    same(np.stack(probabilities), wanted)
    np.testing.assert_allclose(none, [answer.none for answer in answers], atol=1e-3)
    sent = [file.suffix != ".tif" for file in files]
    served = answered_by_the_service(shop, [file for file, was in zip(files, sent, strict=True) if was])
    np.testing.assert_allclose(served, wanted[sent], atol=1e-3)
    strange = np.array(none) > 0.5
    assert 0.02 < strange.mean() < 0.98, "some are unknown and some are not"
    best = np.sort(wanted, axis=1)
    clear = (np.abs(np.array(none) - 0.5) > 1e-3) & (np.abs(best[:, -1] - 0.5) > 1e-3)  # nearer, rounding decides
    sure = clear & (best[:, -1] - best[:, -2] > 1e-3)
    assert sure.mean() > 0.8
    verdicts = np.array([answer.verdict + f": {answer.label}" * (answer.verdict != "unknown") for answer in answers])
    assert (verdicts == printed)[sure].all()


def test_export_for_square_images(model, thousand, exported, tmp_path):
    done = export(model, "onnx", tmp_path / "model.onnx", preprocess=False)
    assert f"float32 [N, 3, {model.side}, {model.side}]" in done.input
    pixels = thousand.pixels.astype(np.float32) / 255
    same(session_of(done.path).run(None, {"images": pixels})[0], model.predict_proba(thousand))
    with pytest.raises(OneaError, match="Only an ONNX file takes photos"):
        export(model, "torch", tmp_path / "model.pt2", preprocess=True)


def test_torch_export_predicts_like_the_model(model, thousand, tmp_path, recwarn):
    done = export(model, "torch", tmp_path / "model.pt2")
    assert not [str(warning.message) for warning in recwarn if "complete tensor" in str(warning.message)]
    loaded = torch.export.load(done.path).module()
    images = torch.from_numpy(thousand.pixels[:100]).float() / 255
    np.testing.assert_allclose(loaded(images)[0].detach(), model.predict_proba(thousand)[:100], atol=1e-4)


def test_a_file_that_differs_is_not_kept(model, tmp_path, monkeypatch):
    monkeypatch.setattr(exporting, "_load_torch", lambda path: lambda batch: (np.zeros((len(batch), 6)), None))
    with pytest.raises(OneaError, match="not kept"):
        export(model, "torch", tmp_path / "model.pt2")
    assert not list(tmp_path.iterdir())


def test_a_folder_is_refused_as_a_file(model, tmp_path):
    """It is refused before the export, with a message about the folder itself."""
    with pytest.raises(OneaError, match=r"is a folder; name a file in it, such as .*/model\.pt2\.$"):
        export(model, "torch", tmp_path)
    assert not list(tmp_path.iterdir())


def test_only_an_earlier_export_is_replaced(model, tmp_path):
    photo = tmp_path / "photo.jpg"
    photo.write_bytes(b"a photo")
    with pytest.raises(OneaError, match=r"photo\.jpg already exists and is not a \.pt2 file; choose another place"):
        export(model, "torch", photo)
    assert photo.read_bytes() == b"a photo"


def test_a_missing_library_is_named(model, tmp_path, monkeypatch):
    import sys

    monkeypatch.setitem(sys.modules, "onnxscript", None)
    with pytest.raises(OneaError, match="pip install"):
        export(model, "onnx", tmp_path / "model.onnx")
    assert not list(tmp_path.iterdir())
