# SPDX-License-Identifier: Apache-2.0
"""Malformed inputs of every kind. Each is a pure function of a random generator, which ``trial_rng`` creates from kind,
seed and number, so that a failed trial can be repeated alone.
"""

from __future__ import annotations

import io
import json
import re
import struct
import zipfile
import zlib
from collections.abc import Iterator, Mapping, Sequence
from random import Random
from typing import Any

import torch
from PIL import Image
from safetensors.torch import load, save


def trial_rng(kind: str, seed: int, number: int) -> Random:
    """The random generator of one trial."""
    return Random(f"{kind} {seed} {number}")


# Bytes


def damaged(content: bytes, rng: Random) -> bytes:
    """Content with bytes changed, removed, repeated or cut off at random places."""
    data = bytearray(content)
    for _ in range(rng.randint(1, 8)):
        place = rng.randrange(len(data) + 1)
        match rng.randrange(6):
            case 0:
                data[place : place + 1] = bytes([rng.randrange(256)])
            case 1:
                del data[place : place + rng.randint(1, 30)]
            case 2:
                data[place:place] = data[: rng.randint(1, 30)]
            case 3:
                data[place : place + 4] = rng.choice([b"\xff\xff\xff\xff", b"\0\0\0\0", b"\x7f\xff\xff\xff"])
            case 4:
                del data[max(place, 8) :]
            case 5 if place < len(data):
                data[place] ^= 1 << rng.randrange(8)
    return bytes(data)


# Values of JSON

ODD: list[Any] = [
    *(None, True, -1, 0, 1, -100, 2**31, 2**53, 2**63, 10**30, 10**400, 0.5, -0.5, 1e-320, 1e308),
    *("", "x", "\x1b[2J", "[red]x[/red]", "9" * 5_000, "/dev/zero", "../..", "\ud800", "unknown"),
    *([], {}, [[]], {"x": 1}, [1, 2, 3], ["class00", "class00"], [None]),
]
_NO_JSON = ["NaN", "-Infinity", "1e999", "9" * 5_000, "[" * 100_000, '{"a":' * 50_000, "", "'x'", "\x00", "\\", "//"]


def leaves(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """The path to each part of a JSON value."""
    yield path
    if isinstance(value, dict | list):
        for key in value if isinstance(value, dict) else range(len(value)):
            yield from leaves(value[key], (*path, key))


def replaced(value: Any, path: tuple[Any, ...], new: Any) -> Any:
    """The value with another part at a path."""
    if not path:
        return new
    copy = value.copy()
    copy[path[0]] = replaced(value[path[0]], path[1:], new)
    return copy


def without(value: Any, path: tuple[Any, ...]) -> Any:
    """The value without the part at a path."""
    copy = value.copy()
    if len(path) == 1:
        del copy[path[0]]
    else:
        copy[path[0]] = without(value[path[0]], path[1:])
    return copy


def odd_value(value: Any, rng: Random) -> Any:
    """The value with one to three parts of a wrong type, out of range, missing or repeated."""
    for _ in range(rng.choice([1, 1, 1, 2, 3])):
        places = [path for path in leaves(value) if path]
        if not places:
            break
        path = rng.choice(places)
        match rng.randrange(8):
            case 0:
                value = without(value, path)
            case 1:
                value = replaced(value, path, [_at(value, path)])
            case 2:
                value = replaced(value, path, _at(value, rng.choice(places)))
            case 3 if isinstance(inner := _at(value, path), list):
                value = replaced(value, path, inner + inner)
            case 4 if isinstance(inner := _at(value, path), dict):
                value = replaced(value, path, inner | {rng.choice(["x", "", "\ud800", "__class__", "a" * 5_000]): 1})
            case _:
                value = replaced(value, path, rng.choice(ODD))
    return value


def _at(value: Any, path: tuple[Any, ...]) -> Any:
    for key in path:
        value = value[key]
    return value


def odd_json(value: Any, rng: Random) -> bytes:
    """A file that should contain this value, with odd values, invalid JSON or damaged bytes."""
    if rng.random() < 0.7:
        return json.dumps(odd_value(value, rng), indent=rng.choice([None, 1])).encode()
    text = json.dumps(value)
    match rng.randrange(5):
        case 0:
            places = [place for place, char in enumerate(text) if char in ":,"]
            place = rng.choice(places) + 1 if places else 0
            return (text[:place] + rng.choice(_NO_JSON) + text[place:]).encode()
        case 1:
            return text.encode(rng.choice(["utf-16", "utf-32", "utf-8-sig"]))
        case 2:
            return rng.choice([b"", b"\xff\xfe", b"null", b"[]", b'"x"', b"0", b"\0" * 100, b"[" * 100_000])
        case 3 if text.startswith("{") and len(text) > 2:  # every name twice, the second time with another value
            return (text[:-1] + "," + json.dumps(dict.fromkeys(value, rng.choice(ODD)))[1:]).encode()
    return damaged(text.encode(), rng)


# Images

FORMATS = ("PNG", "JPEG", "WEBP", "GIF", "BMP", "TIFF", "PPM", "JPEG2000", "ICO", "TGA", "PCX", "DIB")
_MODES = {"JPEG": ("L", "RGB", "CMYK"), "PPM": ("L", "RGB", "1"), "PNG": ("L", "LA", "RGB", "RGBA", "P", "1", "I;16")}
_MODES |= {"GIF": ("L", "P"), "TIFF": ("L", "RGB", "RGBA", "CMYK", "1", "F", "LAB"), "PCX": ("L", "RGB", "P", "1")}
_WIDTH, _HEIGHT = 48, 40
# 36 megapixels are allowed in a local file; the other sizes are too large or invalid.
_SIDES = [(6_000, 6_000), (65_535, 65_535), (0, 40), (48, 0), (1, 1), (2**31 - 1, 1), (2**32 - 1, 2**32 - 1), (49, 41)]


def encoded(kind: str, mode: str = "RGB", **options: Any) -> bytes:
    """A small valid image."""
    gradient = Image.radial_gradient("L").resize((_WIDTH, _HEIGHT))
    image = gradient.convert("RGB").convert(mode) if mode in ("LAB", "CMYK") else gradient.convert(mode)
    content = io.BytesIO()
    image.save(content, kind, **options)
    return content.getvalue()


def image(rng: Random) -> bytes:
    """The file of an image, malformed."""
    kind = rng.choice(FORMATS)
    good = encoded(kind, rng.choice(_MODES.get(kind, ("RGB",))), **_options(kind, rng))
    match rng.randrange(10):
        case 0 | 1:
            return _other_size(good, rng)
        case 2:
            return damaged(_other_size(good, rng), rng)
        case 3:
            other = encoded(rng.choice(FORMATS))
            cut = rng.randrange(len(good))
            return good[:cut] + other[rng.randrange(len(other)) :]
        case 4:
            return rng.choice([b"", good[: rng.randrange(len(good))], rng.randbytes(rng.randrange(2_000)), good * 3])
        case 5:
            return _odd_png(rng)
        case 6:  # only the header, with all declarations
            return damaged(good[:200], rng) + good[200:]
    return damaged(good, rng)


def _options(kind: str, rng: Random) -> dict[str, Any]:
    if kind == "JPEG" and rng.random() < 0.5:
        exif = Image.Exif()
        exif[0x0112] = rng.choice([0, 1, 6, 8, 9, 65_535])
        return {"exif": damaged(exif.tobytes(), rng) if rng.random() < 0.5 else exif, "progressive": True}
    if kind == "TIFF":
        return {"compression": rng.choice(["raw", "tiff_lzw", "tiff_adobe_deflate", "packbits"])}
    if kind == "GIF" and rng.random() < 0.5:
        return {"save_all": True, "append_images": [Image.new("L", (48, 40), shade) for shade in (0, 99)]}
    return {}


def _other_size(content: bytes, rng: Random) -> bytes:
    """The content with another image size in every field that may hold the size."""
    width, height = rng.choice(_SIDES)
    data = content.replace(b"48 40", f"{width} {height}".encode(), 1)
    for order, both in (("<", (_WIDTH, _HEIGHT)), (">", (_WIDTH, _HEIGHT)), (">", (_HEIGHT, _WIDTH))):
        for code, most in (("I", 2**32 - 1), ("H", 2**16 - 1)):
            new = (width, height) if both[0] == _WIDTH else (height, width)
            old = struct.pack(f"{order}2{code}", *both)
            data = data.replace(old, struct.pack(f"{order}2{code}", *(min(side, most) for side in new)), 1)
    if data.startswith(b"\x89PNG"):  # with a valid checksum
        data = data[:29] + struct.pack(">I", zlib.crc32(data[12:29])) + data[33:]
    return data


def _odd_png(rng: Random) -> bytes:
    """Chunks that no encoder writes, with valid checksums."""
    depth, colour = rng.choice([1, 2, 4, 8, 16, 3, 0, 255]), rng.choice([0, 2, 3, 4, 6, 1, 7])
    pixels = zlib.compress(rng.randbytes(rng.choice([0, 10, 6_000])))
    chunks = [
        (b"IHDR", struct.pack(">2I5B", *rng.choice([(48, 40), *_SIDES]), depth, colour, 0, 0, rng.randrange(3))),
        rng.choice([(b"PLTE", rng.randbytes(rng.choice([0, 3, 7, 768, 3_000]))), (b"tRNS", rng.randbytes(300))]),
        rng.choice(
            [
                (b"zTXt", b"bomb\0\0" + zlib.compress(bytes(3_000_000))),
                (b"iCCP", b"bomb\0\0" + zlib.compress(bytes(3_000_000))),
                (b"iTXt", b"bomb\0\1\0\0\0" + zlib.compress(bytes(3_000_000))),
                (b"eXIf", b"Exif\0\0MM\0*" + rng.randbytes(60)),
                (b"acTL", struct.pack(">2I", rng.choice([0, 1, 2**31]), 0)),
                (b"gAMA", b""),
                (b"pHYs", b"\0"),
            ]
        ),
        (b"IDAT", rng.choice([pixels, pixels[:-4], b"", zlib.compress(bytes(1_000_000))])),
        (b"IEND", b""),
    ]
    if rng.random() < 0.3:
        rng.shuffle(chunks)
    pieces = [struct.pack(">I", len(body)) + name + body + _crc(name + body) for name, body in chunks]
    return b"\x89PNG\r\n\x1a\n" + b"".join(pieces)


def _crc(content: bytes) -> bytes:
    return struct.pack(">I", zlib.crc32(content))


# Zips

# One image of a new class is never enough, so nothing can be learned from these in any case.
_FILES = ("plum/0.png", "pear/0.png", "fig/0.png")
_NAMES = [
    *("/etc/passwd", "../plum/0.png", "plum/../../0.png", "C:/0.png", "plum\\0.png", "plum/\0.png", "/", "//", "."),
    *("plum", "plum/0.png", "plum/0.png/0.png", "a/b/c/d.png", "plum/.hidden", "__MACOSX/plum/0.png", "unknown/0.png"),
    *("\x1b[2J/0.png", "\u202egnp/0.png", "\U0001f4a9/0.png", f"{'9' * 5_000}/0.png", "a" * 60_000, "Plum /0.png"),
    *("plum/" * 5_000 + "0.png", "con/aux.png", "\xff/0.png", "class00/0.png", " /0.png", "plum/0.png\n"),
]


def archive(rng: Random) -> bytes:
    """A zip of class folders, malformed."""
    small = encoded("PNG")
    files: list[tuple[str | zipfile.ZipInfo, bytes]] = [(name, small) for name in _FILES]
    for _ in range(rng.choice([0, 0, 1, 1, 3])):
        files.insert(rng.randrange(len(files) + 1), _odd_entry(rng, small))
    content = io.BytesIO()
    with zipfile.ZipFile(content, "w", rng.choice([0, 8, 8, zipfile.ZIP_BZIP2, zipfile.ZIP_LZMA])) as opened:
        opened.comment = rng.choice([b"", b"", b"PK\x05\x06" * 9, rng.randbytes(65_535)])
        for name, data in files:
            opened.writestr(name, data)
    match rng.randrange(4):
        case 0:
            return content.getvalue()
        case 1:
            return damaged(content.getvalue(), rng)
    return _odd_fields(content.getvalue(), rng)


def _odd_entry(rng: Random, small: bytes) -> tuple[str | zipfile.ZipInfo, bytes]:
    match rng.randrange(6):
        case 0:
            entry = zipfile.ZipInfo("plum/link.png")
            entry.external_attr = rng.choice([0o120777, 0o020666, 0o010666, 0o170000]) << 16
            return entry, b"/etc/passwd"
        case 1:
            bomb = zipfile.ZipInfo("plum/bomb.png")
            bomb.compress_type = zipfile.ZIP_DEFLATED
            return bomb, bytes(rng.choice([2_000_000, 12_000_000]))
        case 2:
            return "plum/inner.zip", archive(Random(rng.random()))
        case 3:
            return "plum/1.png", image(rng)
    return rng.choice(_NAMES), rng.choice([small, b"", image(rng)])


def _odd_fields(content: bytes, rng: Random) -> bytes:
    """Headers that contradict the content: sizes, methods, flags, offsets, counts."""
    data = bytearray(content)
    lengths = {b"PK\x03\x04": 30, b"PK\x01\x02": 46, b"PK\x05\x06": 22}
    for _ in range(rng.randint(1, 4)):
        mark = rng.choice(list(lengths))
        if places := [found.start() for found in re.finditer(re.escape(mark), data)]:
            place = rng.choice(places) + rng.randrange(4, lengths[mark])
            odd = rng.choice([b"\xff\xff\xff\xff", b"\0\0\0\0", b"\x01\0", b"\xff\xff", rng.randbytes(2)])
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
    """The bytes of a form with these parts, each a header line and its content."""
    pieces = [f"--{BOUNDARY}\r\n{head}\r\n\r\n".encode() + content + b"\r\n" for head, content in parts]
    return b"".join(pieces) + f"--{BOUNDARY}--\r\n".encode()


def form(content: bytes, label: bytes | None = None) -> tuple[bytes, dict[str, str]]:
    """A form with an image and, for learning, its class; and the header of the request."""
    named = [] if label is None else [('Content-Disposition: form-data; name="class"', label)]
    return multipart((_IMAGE, content), *named), {"Content-Type": f"multipart/form-data; boundary={BOUNDARY}"}


def request(rng: Random) -> Request:
    """Method, address, body and headers of a malformed request; it has no token unless the caller adds one."""
    match rng.randrange(4):
        case 0:  # JSON where none is wanted
            body = odd_json([rng.choice(_BODIES) for _ in range(rng.randrange(4))], rng)
            return "POST", rng.choice(_ASKED), body, {"Content-Type": "application/json"}
        case 1:
            headers = {"Content-Type": rng.choice(_KINDS), "Authorization": rng.choice(_TOKENS)}
            headers |= {"Accept": rng.choice(["*/*", "nonsense", ""]), "X-Forwarded-For": "a" * rng.randrange(2_000)}
            headers |= {"Content-Encoding": rng.choice(["gzip", "br", "", "identity"])} if rng.random() < 0.3 else {}
            return rng.choice(["POST", "PUT", "OPTIONS"]), rng.choice(_ASKED), rng.randbytes(20), headers
        case 2:
            address = f"/learn/{rng.choice(_JOBS)}{rng.choice(['', '/events', '/events/x'])}"
            return rng.choice(["GET", "POST", "DELETE"]), address, b"", {}
    body, headers = form(encoded("PNG"), rng.choice([None, b"plum", b"\xff", b"", b"a" * 20_000, b"unknown"]))
    return "POST", rng.choice(["/predict", "/learn"]), damaged(body, rng), headers


# Tensors

_TYPES = ["F64", "F32", "F16", "BF16", "I64", "I32", "I16", "I8", "U8", "BOOL", "U16", "U32", "U64", "F8_E4M3", "C64"]
_TYPES += ["F8_E5M2", "F8_E8M0", "F4", "F6_E2M3", "X9", "", "f32", "\ud800"]
_SHAPES: list[Any] = [[], [0], [1], [-1], [2**40, 2**40], [2**63], [0, 2**62], ["3"], [True], [1.0], "3", None, [[1]]]
_KINDS_OF_TENSORS = [torch.float64, torch.float16, torch.bfloat16, torch.int64, torch.bool, torch.float8_e4m3fn]
_KINDS_OF_TENSORS += [torch.uint8, torch.uint16, torch.complex64]


def tensors(content: bytes, rng: Random) -> bytes:
    """A malformed safetensors file: damaged bytes, an invalid header, or odd tensors with a valid header."""
    match rng.randrange(5):
        case 0:
            return damaged(content, rng)
        case 1 | 2:
            return _odd_header(content, rng)
    changed = load(content)
    for _ in range(rng.choice([1, 1, 2, 4])):
        if changed:
            changed = _odd_tensor(changed, rng)
    return save(changed)


def _odd_header(content: bytes, rng: Random) -> bytes:
    length = int.from_bytes(content[:8], "little")
    header, body = json.loads(content[8 : 8 + length]), content[8 + length :]
    name = rng.choice([name for name in header if name != "__metadata__"])
    entry = header[name]
    match rng.randrange(9):
        case 0:
            entry = entry | {"dtype": rng.choice(_TYPES)}
        case 1:
            entry = entry | {"shape": rng.choice(_SHAPES)}
        case 2:
            begin, end = entry["data_offsets"]
            offsets = [
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
            entry = entry | {"data_offsets": rng.choice(offsets)}
        case 3:
            return rng.choice([0, 1, length - 1, length + 1, 2**40, 2**64 - 1]).to_bytes(8, "little") + content[8:]
        case 4:
            twice = json.dumps(header)[:-1] + "," + json.dumps({name: entry | {"shape": [1]}})[1:]
            return _with_header(twice.encode(), body)
        case 5:  # as large as before, and of another type
            entry = entry | {"dtype": rng.choice(["I32", "U32", "F32", "I64", "F64"])}
        case 6:
            odd = [{"format": None}, {"format": "\ud800"}, {"format": [1]}, "x", {"a": "b" * 100_000}]
            header = header | {"__metadata__": rng.choice(odd)}
        case _:
            return _with_header(odd_json(header, rng), body)
    return _with_header(json.dumps(header | {name: entry}).encode(), body)


def _with_header(header: bytes, body: bytes) -> bytes:
    return len(header).to_bytes(8, "little") + header + body


def _odd_tensor(tensors: Mapping[str, torch.Tensor], rng: Random) -> dict[str, torch.Tensor]:
    """Tensors that a valid file could contain, but that onea never writes."""
    name = rng.choice(sorted(tensors))
    value = tensors[name]
    rest = {other: tensor for other, tensor in tensors.items() if other != name}
    match rng.randrange(11):
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
            return rest | {rng.choice(other): value}
        case 2:
            kind = rng.choice(_KINDS_OF_TENSORS)
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
            spoiled.flatten()[rng.randrange(value.numel())] = rng.choice([float("nan"), float("inf"), -float("inf")])
            return rest | {name: spoiled}
        case 9:
            return rest | {name: torch.full_like(value.float(), rng.choice([0, 1, 100])).to(value.dtype)}
    return rest | {name: torch.full_like(value.float(), rng.choice([1e38, -1e38, 1e-45, -1])).to(value.dtype)}


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


def yaml(values: Mapping[str, Any], rng: Random) -> bytes:
    """A YAML file of options, malformed."""
    lines = {name: json.dumps(value) for name, value in values.items()}
    for _ in range(rng.randint(1, 3)):
        lines[rng.choice([*lines, "x", "", "options", "threads", "budget", "<<", "? [a]"])] = rng.choice(_ODD_YAML)
    text = "".join(f"{name}: {value}\n" for name, value in lines.items())
    match rng.randrange(8):
        case 0:
            return damaged(text.encode("utf-8", "surrogatepass"), rng)
        case 1:
            return text.encode(rng.choice(["utf-16", "utf-8-sig", "utf-32"]), "surrogatepass")
        case 2:
            inner, outer = rng.choice([("[x]", "[{}]"), ("{x: 1}", "[{}]"), ("{x: 1}", "{{<<: [{}]}}")])
            name = rng.choice(["sizes", "seed", "data", "options", "rank", "x"])
            return (text + aliases(rng.choice([2, 9, 30]), inner, outer, name)).encode("utf-8", "surrogatepass")
        case 3:
            return rng.choice([b"", b"\0", b"\xff", b"---\n---\n", b"- x", b"x", b"#", b"%YAML 9.9\n---\na: 1\n"])
    return text.encode("utf-8", "surrogatepass")


def aliases(depth: int, inner: str, outer: str, name: str) -> str:
    """A few lines that expand to 9 to the power of ``depth`` values, as the value of one option."""
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


def arguments(command: str, base: Sequence[str], options: Sequence[str], rng: Random) -> list[str]:
    """Words for a command: valid ones with some removed, repeated or replaced, and odd options."""
    words = list(base)
    for _ in range(rng.randint(1, 3)):
        place, value = rng.randrange(len(words) + 1), rng.choice(_VALUES)
        match rng.randrange(8):
            case 0 if place < len(words):
                words[place] = value
            case 1 if place < len(words):
                del words[place]
            case 2:
                words.insert(place, value)
            case 3:
                words.insert(place, rng.choice(options))
            case 4:
                words += [rng.choice(["--nothing", "-z", "--no-x", "--=", "--rank", "--kappa=x"]), value]
            case _:
                words += [f"{rng.choice(options)}={value}"] if rng.random() < 0.5 else [rng.choice(options), value]
    return [command, *words]
