# SPDX-License-Identifier: Apache-2.0
"""Malformed inputs of every kind. Each is a pure function of a generator, made from kind, seed and number by ``draws``:
a trial that fails can be repeated alone.
"""

from __future__ import annotations

import io
import json
import random
import re
import struct
import zipfile
import zlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from PIL import Image
from safetensors.torch import load, save

Draw = random.Random


def draws(kind: str, seed: int, number: int) -> Draw:
    """The generator of one trial."""
    return random.Random(f"{kind} {seed} {number}")


# Bytes


def damaged(content: bytes, draw: Draw) -> bytes:
    """Bytes changed, removed, repeated or cut off, at random places."""
    data = bytearray(content)
    for _ in range(draw.randint(1, 8)):
        place = draw.randrange(len(data) + 1)
        match draw.randrange(6):
            case 0:
                data[place : place + 1] = bytes([draw.randrange(256)])
            case 1:
                del data[place : place + draw.randint(1, 30)]
            case 2:
                data[place:place] = data[: draw.randint(1, 30)]
            case 3:
                data[place : place + 4] = draw.choice([b"\xff\xff\xff\xff", b"\0\0\0\0", b"\x7f\xff\xff\xff"])
            case 4:
                del data[max(place, 8) :]
            case 5 if place < len(data):
                data[place] ^= 1 << draw.randrange(8)
    return bytes(data)


# Values of JSON

ODD: list[Any] = [
    *(None, True, -1, 0, 1, -100, 2**31, 2**53, 2**63, 10**30, 10**400, 0.5, -0.5, 1e-320, 1e308),
    *("", "x", "\x1b[2J", "[red]x[/red]", "9" * 5_000, "/dev/zero", "../..", "\ud800", "unknown"),
    *([], {}, [[]], {"x": 1}, [1, 2, 3], ["class00", "class00"], [None]),
]
_NO_JSON = ["NaN", "-Infinity", "1e999", "9" * 5_000, "[" * 100_000, '{"a":' * 50_000, "", "'x'", "\x00", "\\", "//"]


def leaves(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """The way to everything in a value of JSON."""
    yield path
    if isinstance(value, dict | list):
        for key in value if isinstance(value, dict) else range(len(value)):
            yield from leaves(value[key], (*path, key))


def replaced(value: Any, path: tuple[Any, ...], new: Any) -> Any:
    """The value with something else in one place."""
    if not path:
        return new
    copy = value.copy()
    copy[path[0]] = replaced(value[path[0]], path[1:], new)
    return copy


def without(value: Any, path: tuple[Any, ...]) -> Any:
    """The value without what is in one place."""
    copy = value.copy()
    if len(path) == 1:
        del copy[path[0]]
    else:
        copy[path[0]] = without(value[path[0]], path[1:])
    return copy


def odd_value(value: Any, draw: Draw) -> Any:
    """The value with one to three parts of another type, out of every range, missing or too many."""
    for _ in range(draw.choice([1, 1, 1, 2, 3])):
        places = [path for path in leaves(value) if path]
        if not places:
            break
        path = draw.choice(places)
        match draw.randrange(8):
            case 0:
                value = without(value, path)
            case 1:
                value = replaced(value, path, [_at(value, path)])
            case 2:
                value = replaced(value, path, _at(value, draw.choice(places)))
            case 3 if isinstance(inner := _at(value, path), list):
                value = replaced(value, path, inner + inner)
            case 4 if isinstance(inner := _at(value, path), dict):
                value = replaced(value, path, inner | {draw.choice(["x", "", "\ud800", "__class__", "a" * 5_000]): 1})
            case _:
                value = replaced(value, path, draw.choice(ODD))
    return value


def _at(value: Any, path: tuple[Any, ...]) -> Any:
    for key in path:
        value = value[key]
    return value


def odd_json(value: Any, draw: Draw) -> bytes:
    """A file that should hold this value: odd values in it, not JSON, or damaged bytes."""
    if draw.random() < 0.7:
        return json.dumps(odd_value(value, draw), indent=draw.choice([None, 1])).encode()
    text = json.dumps(value)
    match draw.randrange(5):
        case 0:
            places = [place for place, char in enumerate(text) if char in ":,"]
            place = draw.choice(places) + 1 if places else 0
            return (text[:place] + draw.choice(_NO_JSON) + text[place:]).encode()
        case 1:
            return text.encode(draw.choice(["utf-16", "utf-32", "utf-8-sig"]))
        case 2:
            return draw.choice([b"", b"\xff\xfe", b"null", b"[]", b'"x"', b"0", b"\0" * 100, b"[" * 100_000])
        case 3 if text.startswith("{") and len(text) > 2:  # every name twice, the second time with something else
            return (text[:-1] + "," + json.dumps(dict.fromkeys(value, draw.choice(ODD)))[1:]).encode()
    return damaged(text.encode(), draw)


# Images

FORMATS = ("PNG", "JPEG", "WEBP", "GIF", "BMP", "TIFF", "PPM", "JPEG2000", "ICO", "TGA", "PCX", "DIB")
_MODES = {"JPEG": ("L", "RGB", "CMYK"), "PPM": ("L", "RGB", "1"), "PNG": ("L", "LA", "RGB", "RGBA", "P", "1", "I;16")}
_MODES |= {"GIF": ("L", "P"), "TIFF": ("L", "RGB", "RGBA", "CMYK", "1", "F", "LAB"), "PCX": ("L", "RGB", "P", "1")}
_WIDTH, _HEIGHT = 48, 40
# 36 megapixels are allowed in a file of one's own; the other sizes are not, or are none.
_SIDES = [(6_000, 6_000), (65_535, 65_535), (0, 40), (48, 0), (1, 1), (2**31 - 1, 1), (2**32 - 1, 2**32 - 1), (49, 41)]


def encoded(kind: str, mode: str = "RGB", **options: Any) -> bytes:
    """A small good image."""
    gradient = Image.radial_gradient("L").resize((_WIDTH, _HEIGHT))
    image = gradient.convert("RGB").convert(mode) if mode in ("LAB", "CMYK") else gradient.convert(mode)
    content = io.BytesIO()
    image.save(content, kind, **options)
    return content.getvalue()


def image(draw: Draw) -> bytes:
    """The file of an image, spoilt."""
    kind = draw.choice(FORMATS)
    good = encoded(kind, draw.choice(_MODES.get(kind, ("RGB",))), **_options(kind, draw))
    match draw.randrange(10):
        case 0 | 1:
            return _other_size(good, draw)
        case 2:
            return damaged(_other_size(good, draw), draw)
        case 3:
            other = encoded(draw.choice(FORMATS))
            cut = draw.randrange(len(good))
            return good[:cut] + other[draw.randrange(len(other)) :]
        case 4:
            return draw.choice(
                [b"", good[: draw.randrange(len(good))], draw.randbytes(draw.randrange(2_000)), good * 3]
            )
        case 5:
            return _odd_png(draw)
        case 6:  # only the head, where everything is declared
            return damaged(good[:200], draw) + good[200:]
    return damaged(good, draw)


def _options(kind: str, draw: Draw) -> dict[str, Any]:
    if kind == "JPEG" and draw.random() < 0.5:
        exif = Image.Exif()
        exif[0x0112] = draw.choice([0, 1, 6, 8, 9, 65_535])
        return {"exif": damaged(exif.tobytes(), draw) if draw.random() < 0.5 else exif, "progressive": True}
    if kind == "TIFF":
        return {"compression": draw.choice(["raw", "tiff_lzw", "tiff_adobe_deflate", "packbits"])}
    if kind == "GIF" and draw.random() < 0.5:
        return {"save_all": True, "append_images": [Image.new("L", (48, 40), shade) for shade in (0, 99)]}
    return {}


def _other_size(content: bytes, draw: Draw) -> bytes:
    """Wherever the file may say how large the image is, it says something else."""
    width, height = draw.choice(_SIDES)
    data = content.replace(b"48 40", f"{width} {height}".encode(), 1)
    for order, both in (("<", (_WIDTH, _HEIGHT)), (">", (_WIDTH, _HEIGHT)), (">", (_HEIGHT, _WIDTH))):
        for code, most in (("I", 2**32 - 1), ("H", 2**16 - 1)):
            new = (width, height) if both[0] == _WIDTH else (height, width)
            old = struct.pack(f"{order}2{code}", *both)
            data = data.replace(old, struct.pack(f"{order}2{code}", *(min(side, most) for side in new)), 1)
    if data.startswith(b"\x89PNG"):  # with the checksum that fits
        data = data[:29] + struct.pack(">I", zlib.crc32(data[12:29])) + data[33:]
    return data


def _odd_png(draw: Draw) -> bytes:
    """Chunks that no encoder writes, with checksums that fit."""
    depth, colour = draw.choice([1, 2, 4, 8, 16, 3, 0, 255]), draw.choice([0, 2, 3, 4, 6, 1, 7])
    pixels = zlib.compress(draw.randbytes(draw.choice([0, 10, 6_000])))
    chunks = [
        (b"IHDR", struct.pack(">2I5B", *draw.choice([(48, 40), *_SIDES]), depth, colour, 0, 0, draw.randrange(3))),
        draw.choice([(b"PLTE", draw.randbytes(draw.choice([0, 3, 7, 768, 3_000]))), (b"tRNS", draw.randbytes(300))]),
        draw.choice(
            [
                (b"zTXt", b"bomb\0\0" + zlib.compress(bytes(3_000_000))),
                (b"iCCP", b"bomb\0\0" + zlib.compress(bytes(3_000_000))),
                (b"iTXt", b"bomb\0\1\0\0\0" + zlib.compress(bytes(3_000_000))),
                (b"eXIf", b"Exif\0\0MM\0*" + draw.randbytes(60)),
                (b"acTL", struct.pack(">2I", draw.choice([0, 1, 2**31]), 0)),
                (b"gAMA", b""),
                (b"pHYs", b"\0"),
            ]
        ),
        (b"IDAT", draw.choice([pixels, pixels[:-4], b"", zlib.compress(bytes(1_000_000))])),
        (b"IEND", b""),
    ]
    if draw.random() < 0.3:
        draw.shuffle(chunks)
    pieces = [struct.pack(">I", len(body)) + name + body + _crc(name + body) for name, body in chunks]
    return b"\x89PNG\r\n\x1a\n" + b"".join(pieces)


def _crc(content: bytes) -> bytes:
    return struct.pack(">I", zlib.crc32(content))


# Zips

# One image of a new class is never enough: whatever becomes of these, there is nothing to learn from.
_FILES = ("plum/0.png", "pear/0.png", "fig/0.png")
_NAMES = [
    *("/etc/passwd", "../plum/0.png", "plum/../../0.png", "C:/0.png", "plum\\0.png", "plum/\0.png", "/", "//", "."),
    *("plum", "plum/0.png", "plum/0.png/0.png", "a/b/c/d.png", "plum/.hidden", "__MACOSX/plum/0.png", "unknown/0.png"),
    *("\x1b[2J/0.png", "\u202egnp/0.png", "\U0001f4a9/0.png", f"{'9' * 5_000}/0.png", "a" * 60_000, "Plum /0.png"),
    *("plum/" * 5_000 + "0.png", "con/aux.png", "\xff/0.png", "class00/0.png", " /0.png", "plum/0.png\n"),
]


def archive(draw: Draw) -> bytes:
    """A zip of class folders, spoilt."""
    small = encoded("PNG")
    files: list[tuple[str | zipfile.ZipInfo, bytes]] = [(name, small) for name in _FILES]
    for _ in range(draw.choice([0, 0, 1, 1, 3])):
        files.insert(draw.randrange(len(files) + 1), _odd_entry(draw, small))
    content = io.BytesIO()
    with zipfile.ZipFile(content, "w", draw.choice([0, 8, 8, zipfile.ZIP_BZIP2, zipfile.ZIP_LZMA])) as opened:
        opened.comment = draw.choice([b"", b"", b"PK\x05\x06" * 9, draw.randbytes(65_535)])
        for name, data in files:
            opened.writestr(name, data)
    match draw.randrange(4):
        case 0:
            return content.getvalue()
        case 1:
            return damaged(content.getvalue(), draw)
    return _odd_fields(content.getvalue(), draw)


def _odd_entry(draw: Draw, small: bytes) -> tuple[str | zipfile.ZipInfo, bytes]:
    match draw.randrange(6):
        case 0:
            entry = zipfile.ZipInfo("plum/link.png")
            entry.external_attr = draw.choice([0o120777, 0o020666, 0o010666, 0o170000]) << 16
            return entry, b"/etc/passwd"
        case 1:
            bomb = zipfile.ZipInfo("plum/bomb.png")
            bomb.compress_type = zipfile.ZIP_DEFLATED
            return bomb, bytes(draw.choice([2_000_000, 12_000_000]))
        case 2:
            return "plum/inner.zip", archive(Draw(draw.random()))
        case 3:
            return "plum/1.png", image(draw)
    return draw.choice(_NAMES), draw.choice([small, b"", image(draw)])


def _odd_fields(content: bytes, draw: Draw) -> bytes:
    """Heads that say something else than what follows: sizes, methods, flags, places, counts."""
    data = bytearray(content)
    lengths = {b"PK\x03\x04": 30, b"PK\x01\x02": 46, b"PK\x05\x06": 22}
    for _ in range(draw.randint(1, 4)):
        mark = draw.choice(list(lengths))
        if places := [found.start() for found in re.finditer(re.escape(mark), data)]:
            place = draw.choice(places) + draw.randrange(4, lengths[mark])
            odd = draw.choice([b"\xff\xff\xff\xff", b"\0\0\0\0", b"\x01\0", b"\xff\xff", draw.randbytes(2)])
            data[place : place + len(odd)] = odd
    return bytes(data)


# Requests

BOUNDARY = "limit"
_IMAGE = 'Content-Disposition: form-data; name="images"; filename="a.png"'
_KINDS = ["", ";", "/", "multipart/form-data; boundary=", "multipart/form-data; boundary=\xe9", "image/", "a" * 5_000]
_TOKENS = ["", "Bearer", "Bearer " + "x" * 5_000, "Bearer \x7f", "Basic Og==", "Digest a=b"]
_BODIES = [None, 0, -1, 1e308, "", "class00", [], {}, {"class": None}, {"images": ["../../etc/passwd"]}, "\ud800"]
_ASKED = [
    "/predict",
    "/predict?top=x",
    "/predict?top=%ff&top=1",
    "/predict?top=99999999999999999999",
    "/learn",
    "/undo",
]
_JOBS = ["x", "%00", "..%2f..", "%ff", "9" * 5_000, "\U0001f4a9", "a/b/c", "0" * 32, ""]

Request = tuple[str, str, bytes, dict[str, str]]


def multipart(*parts: tuple[str, bytes]) -> bytes:
    """A form as bytes, to be damaged: header line and content of each part."""
    pieces = [f"--{BOUNDARY}\r\n{head}\r\n\r\n".encode() + content + b"\r\n" for head, content in parts]
    return b"".join(pieces) + f"--{BOUNDARY}--\r\n".encode()


def form(content: bytes, label: bytes | None = None) -> tuple[bytes, dict[str, str]]:
    """A form with an image and, if it is to be learned, its class; and the header that goes with it."""
    named = [] if label is None else [('Content-Disposition: form-data; name="class"', label)]
    return multipart((_IMAGE, content), *named), {"Content-Type": f"multipart/form-data; boundary={BOUNDARY}"}


def request(draw: Draw) -> Request:
    """Method, address, body and headers of a request that nobody means; it has no token, or the right one later."""
    match draw.randrange(4):
        case 0:  # JSON where none is wanted
            body = odd_json([draw.choice(_BODIES) for _ in range(draw.randrange(4))], draw)
            return "POST", draw.choice(_ASKED), body, {"Content-Type": "application/json"}
        case 1:
            headers = {"Content-Type": draw.choice(_KINDS), "Authorization": draw.choice(_TOKENS)}
            headers |= {"Accept": draw.choice(["*/*", "nonsense", ""]), "X-Forwarded-For": "a" * draw.randrange(2_000)}
            headers |= {"Content-Encoding": draw.choice(["gzip", "br", "", "identity"])} if draw.random() < 0.3 else {}
            return draw.choice(["POST", "PUT", "OPTIONS"]), draw.choice(_ASKED), draw.randbytes(20), headers
        case 2:
            address = f"/learn/{draw.choice(_JOBS)}{draw.choice(['', '/events', '/events/x'])}"
            return draw.choice(["GET", "POST", "DELETE"]), address, b"", {}
    body, headers = form(encoded("PNG"), draw.choice([None, b"plum", b"\xff", b"", b"a" * 20_000, b"unknown"]))
    return "POST", draw.choice(["/predict", "/learn"]), damaged(body, draw), headers


# Tensors

_TYPES = ["F64", "F32", "F16", "BF16", "I64", "I32", "I16", "I8", "U8", "BOOL", "U16", "U32", "U64", "F8_E4M3", "C64"]
_TYPES += ["F8_E5M2", "F8_E8M0", "F4", "F6_E2M3", "X9", "", "f32", "\ud800"]
_SHAPES: list[Any] = [[], [0], [1], [-1], [2**40, 2**40], [2**63], [0, 2**62], ["3"], [True], [1.0], "3", None, [[1]]]
_KINDS_OF_TENSORS = [torch.float64, torch.float16, torch.bfloat16, torch.int64, torch.bool, torch.float8_e4m3fn]
_KINDS_OF_TENSORS += [torch.uint8, torch.uint16, torch.complex64]


def tensors(content: bytes, draw: Draw) -> bytes:
    """A safetensors file, spoilt: its bytes, its header, or what a good header declares."""
    match draw.randrange(5):
        case 0:
            return damaged(content, draw)
        case 1 | 2:
            return _odd_header(content, draw)
    changed = load(content)
    for _ in range(draw.choice([1, 1, 2, 4])):
        if changed:
            changed = _odd_tensor(changed, draw)
    return save(changed)


def _odd_header(content: bytes, draw: Draw) -> bytes:
    length = int.from_bytes(content[:8], "little")
    header, body = json.loads(content[8 : 8 + length]), content[8 + length :]
    name = draw.choice([name for name in header if name != "__metadata__"])
    entry = header[name]
    match draw.randrange(9):
        case 0:
            entry = entry | {"dtype": draw.choice(_TYPES)}
        case 1:
            entry = entry | {"shape": draw.choice(_SHAPES)}
        case 2:
            begin, end = entry["data_offsets"]
            odd = [
                [end, begin],
                [begin, begin],
                [0, 2**60],
                [begin + 1, end + 1],
                [-1, end],
                [0, 0],
                None,
                [begin],
                "x",
            ]
            entry = entry | {"data_offsets": draw.choice(odd)}
        case 3:
            return draw.choice([0, 1, length - 1, length + 1, 2**40, 2**64 - 1]).to_bytes(8, "little") + content[8:]
        case 4:
            twice = json.dumps(header)[:-1] + "," + json.dumps({name: entry | {"shape": [1]}})[1:]
            return _with_header(twice.encode(), body)
        case 5:  # as large as before, and of another type
            entry = entry | {"dtype": draw.choice(["I32", "U32", "F32", "I64", "F64"])}
        case 6:
            odd = [{"format": None}, {"format": "\ud800"}, {"format": [1]}, "x", {"a": "b" * 100_000}]
            header = header | {"__metadata__": draw.choice(odd)}
        case _:
            return _with_header(odd_json(header, draw), body)
    return _with_header(json.dumps(header | {name: entry}).encode(), body)


def _with_header(header: bytes, body: bytes) -> bytes:
    return len(header).to_bytes(8, "little") + header + body


def _odd_tensor(found: Mapping[str, torch.Tensor], draw: Draw) -> dict[str, torch.Tensor]:
    """Tensors that a good file could hold, and nobody would have written."""
    name = draw.choice(sorted(found))
    value = found[name]
    rest = {other: each for other, each in found.items() if other != name}
    match draw.randrange(11):
        case 0:
            return rest
        case 1:
            other = [
                "x",
                "",
                f"{name}.x",
                "blocks.999999999.x",
                "blocks.9" + "9" * 5_000 + ".",
                "\x1b[2J",
                "head.weight",
            ]
            return rest | {draw.choice(other): value}
        case 2:
            kind = draw.choice(_KINDS_OF_TENSORS)
            return rest | {name: value.to(kind)}
        case 3:
            return rest | {name: value[:0].clone() if value.dim() else value.reshape(1)}
        case 4 if value.numel():
            return rest | {name: value.flatten()[:1].reshape(()).clone()}
        case 5:
            return rest | {name: value[None].clone()}
        case 6:
            return rest | {name: torch.cat([value, value]) if value.dim() else value.repeat(3)}
        case 7:
            return rest | {name: value.transpose(0, -1).contiguous() if value.dim() else value.repeat(2)}
        case 8 if value.is_floating_point() and value.numel():
            spoiled = value.clone()
            spoiled.flatten()[draw.randrange(value.numel())] = draw.choice([float("nan"), float("inf"), -float("inf")])
            return rest | {name: spoiled}
        case 9:
            return rest | {name: torch.full_like(value.float(), draw.choice([0, 1, 100])).to(value.dtype)}
    return rest | {name: torch.full_like(value.float(), draw.choice([1e38, -1e38, 1e-45, -1])).to(value.dtype)}


# YAML

_ODD_YAML = [
    *(
        "",
        "~",
        "{}",
        "[]",
        "[[[]]]",
        "{a: {b: c}}",
        "x",
        "-1",
        "0",
        "1e400",
        ".nan",
        ".inf",
        "9" * 5_000,
        "0x" + "f" * 300,
    ),
    *(
        "true",
        "2021-13-45",
        "2021-99-99 25:61:61",
        "1:2:3:4:5",
        "0b2",
        "0o9",
        "1_000",
        "!!int x",
        "!!int ''",
        "!!bool x",
    ),
    *(
        "!!float x",
        "!!float ''",
        "!!timestamp x",
        "!!binary x",
        "!!null x",
        "!!set {a}",
        "!!omap [a]",
        "!!pairs [{a: 1}]",
    ),
    *("!!python/object/apply:os.system [x]", "!x y", "!<tag:yaml.org,2002:int> []", "!!str []", "!!map x", "!!seq {}"),
    *(
        '"\\ud800"',
        '"a\\0b"',
        '"\\x1b[2J"',
        '"\\u202e"',
        "'",
        '"',
        "*x",
        "&x",
        "&x [*x]",
        "&x {a: *x}",
        "- - - x",
        "? x",
    ),
    *(
        "|",
        ">\n  x",
        "@",
        "`",
        "%TAG",
        "\t",
        "<<",
        "{<<: x}",
        "{<<: [x]}",
        "{? [a]: b}",
        "{? {a: b}: c}",
        "folder:\ud800",
    ),
    *("[1, 2, x]", "[" + "1," * 3_000 + "1]", "[" * 2_000, "{a: " * 2_000, "---", "...", "--- x", "1" + "0" * 30),
    *("one-a", "simplecil", "glyphs", "folder:/dev/null", "list:/dev/zero", "x.safetensors", "/dev/zero.safetensors"),
]


def yaml(values: Mapping[str, Any], draw: Draw) -> bytes:
    """A file of options, spoilt."""
    lines = {name: json.dumps(value) for name, value in values.items()}
    for _ in range(draw.randint(1, 3)):
        lines[draw.choice([*lines, "x", "", "options", "threads", "budget", "<<", "? [a]"])] = draw.choice(_ODD_YAML)
    text = "".join(f"{name}: {value}\n" for name, value in lines.items())
    match draw.randrange(8):
        case 0:
            return damaged(text.encode("utf-8", "surrogatepass"), draw)
        case 1:
            return text.encode(draw.choice(["utf-16", "utf-8-sig", "utf-32"]), "surrogatepass")
        case 2:
            inner, outer = draw.choice([("[x]", "[{}]"), ("{x: 1}", "[{}]"), ("{x: 1}", "{{<<: [{}]}}")])
            name = draw.choice(["sizes", "seed", "data", "options", "rank", "x"])
            return (text + aliases(draw.choice([2, 9, 30]), inner, outer, name)).encode("utf-8", "surrogatepass")
        case 3:
            return draw.choice([b"", b"\0", b"\xff", b"---\n---\n", b"- x", b"x", b"#", b"%YAML 9.9\n---\na: 1\n"])
    return text.encode("utf-8", "surrogatepass")


def aliases(depth: int, inner: str, outer: str, name: str) -> str:
    """A few lines that stand for 9 to the power of ``depth`` values, the last of them of one option."""
    lines = [f"a0: &a0 {inner}"]
    for level in range(depth):
        lines.append(f"a{level + 1}: &a{level + 1} " + outer.format(", ".join(9 * [f"*a{level}"])))
    return "\n".join([*lines, f"{name}: *a{depth}", ""])


# Arguments

_VALUES = [
    *(
        "9" * 25,
        "-" + "9" * 25,
        "nan",
        "inf",
        "-inf",
        "1e308",
        "1e-320",
        "9" * 5_000,
        "-1",
        "0x10",
        "1_0",
        "\u0661",
        "٣",
        "",
    ),
    *("a" * 5_000, "b/" * 3_000 + "c", "nul\0byte", "\udcff\udcfe", "/dev/null/x", "/dev/null", ".", "..", "~nobody/x"),
    *(
        "\x1b[2J",
        "[red]x",
        "[/]",
        "\u202e",
        "\U0001f4a9",
        "%s%n",
        "{}",
        "${HOME}",
        "-",
        "--",
        "--x",
        "-o",
        "*",
        "**/",
        "[",
        "\n",
    ),
    *("folder:", "list:", "list:,", "folder:\0", "x.safetensors", "ray:", "3,1,2", ",", "1,,2", "1;2", "true", "none"),
]


def arguments(command: str, base: Sequence[str], options: Sequence[str], draw: Draw) -> list[str]:
    """Words for a command: good ones, with some removed, repeated or replaced, and odd options among them."""
    words = list(base)
    for _ in range(draw.randint(1, 3)):
        place, value = draw.randrange(len(words) + 1), draw.choice(_VALUES)
        match draw.randrange(8):
            case 0 if place < len(words):
                words[place] = value
            case 1 if place < len(words):
                del words[place]
            case 2:
                words.insert(place, value)
            case 3:
                words.insert(place, draw.choice(options))
            case 4:
                words += [draw.choice(["--nothing", "-z", "--no-x", "--=", "--rank", "--kappa=x"]), value]
            case _:
                words += [f"{draw.choice(options)}={value}"] if draw.random() < 0.5 else [draw.choice(options), value]
    return [command, *words]
