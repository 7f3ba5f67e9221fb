"""Feeds broken files of one weight format to the reader: `python -m tests.weights.fuzz FORMAT COUNT SEED`.

Every input must be read, or refused with exit code 2 or 3; anything else (another exception, more than 20 s,
more memory than a multiple of the file) ends the run with the input's number, and the file is kept. The process
limits its own address space, so that an allocation that a file claims fails at once.
"""

from __future__ import annotations

import json
import pickle
import resource
import shutil
import signal
import struct
import sys
import tempfile
import traceback
import tracemalloc
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import save_file

from reshard_cli.errors import ReshardError
from reshard_cli.plan.build import Plan, build_plan
from reshard_cli.refit.endpoints import open_source
from reshard_cli.spec.headers import is_rank_folder
from reshard_cli.spec.model_document import model_document_text, read_model
from reshard_cli.spec.names import template_of
from tests.support import make_jobs, model_document

TENSORS = {
    "a": torch.arange(12.0).view(4, 3), "layers.0.b": torch.arange(6).to(torch.bfloat16), "c": torch.tensor(3),
    "experts.0.w": torch.ones(2, 2), "experts.1.w": torch.zeros(2, 2), "e": torch.empty(0, 2), "t": torch.randn(3, 2).t(),
}  # fmt: skip
NUMBERS = [
    0,
    1,
    2,
    7,
    63,
    127,
    128,
    255,
    256,
    65535,
    2**31 - 1,
    2**31,
    2**32 - 1,
    2**32,
    2**53,
    2**60,
    2**63 - 1,
    2**64 - 1,
]
# memory beside the reader's own: what Python makes of a byte of JSON or of a pickle's opcode
BYTES_PER_BYTE, BYTES_BESIDE = 200, 2 << 20
ROOM = 512 << 20  # address space that a run may add; a mapped file is small
LONGEST = 20


@dataclass
class Subject:
    """A format: its valid folder, the plan that reads it, the file that is broken, and how it is broken."""

    folder: Path
    plan: Plan
    file: str
    breakers: list[Callable[[bytes, Random], bytes]]


def flip_bits(data: bytes, random: Random) -> bytes:
    broken = bytearray(data)
    for _ in range(random.choice([1, 1, 1, 2, 8, 64])):
        broken[random.randrange(len(broken))] ^= 1 << random.randrange(8)
    return bytes(broken)


def truncate(data: bytes, random: Random) -> bytes:
    return data[: random.choice([0, 1, 7, 8, 9, len(data) - 1, random.randrange(len(data))])]


def lengthen(data: bytes, random: Random) -> bytes:
    return data + random.randbytes(random.choice([1, 8, 100]))


def set_number(data: bytes, random: Random) -> bytes:
    width = random.choice([1, 2, 4, 8])
    at = random.randrange(max(1, len(data) - width))
    number = random.choice([*NUMBERS, len(data), len(data) + 1, random.randrange(len(data))]) % (
        1 << 8 * width
    )
    return data[:at] + number.to_bytes(width, "little") + data[at + width :]


def splice(data: bytes, random: Random) -> bytes:
    """Remove, repeat or move a run of bytes."""
    start = random.randrange(len(data))
    stop = min(len(data), start + random.choice([1, 2, 4, 16, 64]))
    to = random.randrange(len(data))
    run = data[start:stop]
    return random.choice(
        [
            data[:start] + data[stop:],
            data[:stop] + run * random.choice([1, 2, 50]) + data[stop:],
            data[:to] + run + data[to:],
        ]
    )


def nodes(value: Any) -> list[tuple[Any, Any]]:
    """Return (container, key) of every value inside a JSON value."""
    found: list[tuple[Any, Any]] = []
    todo = [value]
    while todo:
        one = todo.pop()
        items = one.items() if isinstance(one, dict) else enumerate(one) if isinstance(one, list) else ()
        for key, inner in items:
            found.append((one, key))
            todo.append(inner)
    return found


def broken_json(text: bytes, random: Random) -> bytes:
    """Break a JSON document in its meaning: odd values, renamed and repeated keys, deep nesting."""
    value = json.loads(text)
    for _ in range(random.choice([1, 1, 2, 3])):
        places = nodes(value)
        if not places:
            break
        container, key = random.choice(places)
        odd = [
            None, True, -1, 1.5, 1e300, "", "x", "\ud800", "../x", "x" * 5000, "model.safetensors", [], {}, [[]], float("nan"),
            "F32", "BOOL", 10**4000, 10**30, [2**62] * 4, [10**1000] * 60, [0] * 70, [0, 2**64], random.choice(NUMBERS), container,
        ]  # fmt: skip
        replacement = random.choice(odd)
        if replacement is container:  # another place's value
            other, other_key = random.choice(places)
            replacement = json.loads(json.dumps(other.get(other_key) if isinstance(other, dict) else None))
        if isinstance(container, dict) and random.random() < 0.3:
            name = random.choice(
                [
                    "\ud800",
                    "",
                    "__metadata__",
                    "a" * 5000,
                    "experts.9.w",
                    "experts.00.w",
                    "module.a",
                    "{layer}",
                    "*",
                    "0",
                ]
            )
            container[name] = container.pop(key)
        else:
            container[key] = replacement
    sys.set_int_max_str_digits(0)
    out = json.dumps(value, ensure_ascii=random.random() < 0.8).encode("utf-8", "surrogatepass")
    sys.set_int_max_str_digits(4300)
    if random.random() < 0.1:
        out = out[:-1] + b"," + out[1:]  # every key twice
    if random.random() < 0.05:
        out = out.replace(b":", b":" + b"[" * 100_000, 1)
    return out


def broken_header(data: bytes, random: Random) -> bytes:
    (length,) = struct.unpack("<Q", data[:8])
    text = broken_json(data[8 : 8 + length], random)
    return struct.pack("<Q", len(text)) + text + data[8 + length :]


OPCODES = [
    b"\x80\x04", b"\x95" + b"\xff" * 8, b"r\xff\xff\xff\x7f", b"j\xff\xff\xff\xff", b"B\xff\xff\xff\x7f",
    b"\x8e" + b"\xff" * 7 + b"\x0f", b"X\xff\xff\xff\x7f", b"\x8d" + b"\xff" * 8, b"\x8b\xff\xff\xff\x7f",
    b"cos\nsystem\n", b"\x8c\x02os\x8c\x06system\x93", b"(", b")", b".", b"0", b"1", b"2", b"N", b"R", b"\x81",
    b"b", b"}", b"]", b"a", b"e", b"u", b"s", b"t", b"\x85" * 500, b"\x94", b"h\x00", b"h\x05", b"]\x94h\x00a",
    b"Q", b"Pid\n", b"(" * 2000, b"K\xff", b"M\xff\xff", b"J\xff\xff\xff\xff", b"\x8a\xff" + b"\xff" * 255,
    b"I99\n", b"L" + b"9" * 5000 + b"L\n", b"2\x86" * 60, b"h\x001" * 3,
]  # fmt: skip


def insert_opcodes(data: bytes, random: Random) -> bytes:
    """Put opcodes where there are others: claims of sizes, calls, deep and recursive values."""
    for _ in range(random.choice([1, 1, 2, 4])):
        at = random.randrange(len(data) + 1)
        data = data[:at] + random.choice(OPCODES) + data[at + random.choice([0, 0, 1, 2]) :]
    return data


def broken_metadata(data: bytes, random: Random) -> bytes:
    """Change values of a DCP metadata that stays a valid pickle."""
    metadata = pickle.loads(data)
    name = random.choice(list(metadata.state_dict_metadata))
    entry = metadata.state_dict_metadata[name]
    key = random.choice(list(metadata.storage_data))
    info = metadata.storage_data[key]
    number = random.choice([*NUMBERS, -1, -(2**40), None, 1.5, "x", True, 10**5000])
    corner = tuple(
        random.choice([0, 1, 2, 4, 2**31, 2**55, -1, 10**30]) for _ in range(random.choice([0, 1, 2, 3, 70]))
    )
    chunk = random.choice(entry.chunks) if getattr(entry, "chunks", None) else None
    kind = random.randrange(10)
    if kind == 0 and chunk is not None:
        chunk.offsets = corner
    elif kind == 1 and chunk is not None:
        chunk.sizes = corner
    elif kind == 2:
        entry.size = corner
    elif kind == 3:
        setattr(info, random.choice(["offset", "length"]), number)
    elif kind == 4:
        info.relative_path = random.choice(
            ["", ".", "..", "../x", "/etc/passwd", "a\0b", ".metadata", "x" * 5000, 3, None]
        )
    elif kind == 5:
        metadata.storage_data[key] = random.choice([*metadata.storage_data.values(), None, 3, metadata])
    elif kind == 6 and chunk is not None:
        entry.chunks = random.choice(
            [[], [chunk] * 3, [chunk] * 20_000, [None], None, [entry], entry.chunks * 2]
        )
    elif kind == 7:
        metadata.state_dict_metadata[random.choice(["a", "model.a", "", "\ud800", 3, None])] = random.choice(
            [entry, None, 3]
        )
    elif kind == 8:
        attribute = random.choice(["state_dict_metadata", "planner_data", "storage_data"])
        setattr(
            metadata,
            attribute,
            random.choice([None, {}, [], 3, {name: ()}, {name: ("a", 3)}, {name: (None,)}, {3: 3}]),
        )
    elif hasattr(entry, "properties"):
        entry.properties.dtype = random.choice([torch.float32, torch.complex128, torch.int8, torch.float64])
    return pickle.dumps(metadata, random.choice([2, 4]))


def broken_zip(data: bytes, random: Random) -> bytes:
    """Change a field of one of the zip structures, most of which say where something is and how long it is."""
    spots = [
        at for sign in (b"PK\1\2", b"PK\3\4", b"PK\5\6", b"PK\6\6", b"PK\6\7") for at in found_at(data, sign)
    ]
    broken = bytearray(data)
    for _ in range(random.choice([1, 1, 2, 3])):
        width = random.choice([2, 4, 4, 8])
        at = random.choice(spots) + random.randrange(4, 60)
        if at + width <= len(data):
            number = random.choice([*NUMBERS, 8, 20, len(data), random.randrange(len(data))]) % (
                1 << 8 * width
            )
            broken[at : at + width] = number.to_bytes(width, "little")
    return bytes(broken)


def broken_inner_pickle(data: bytes, random: Random) -> bytes:
    """Change bytes of one of the archives' own pickles, in which shapes and strides stand."""
    at = random.choice(found_at(data, b"_rebuild_tensor"))
    at += random.randrange(15, 150)
    return data[:at] + random.choice([*OPCODES[:20], *(bytes([one]) for one in range(256))]) + data[at + 1 :]


def found_at(data: bytes, sign: bytes) -> list[int]:
    spots, at = [], data.find(sign)
    while at >= 0:
        spots.append(at)
        at = data.find(sign, at + 1)
    return spots


PLAIN = [flip_bits, truncate, lengthen, set_number, splice]


def subject_of(kind: str, folder: Path) -> Subject:
    """Write a small valid folder of this format."""
    job = {"ranks": 1, "tensors": [{"match": "*"}]}
    names = {name: (list(one.shape), str(one.dtype).removeprefix("torch.")) for name, one in TENSORS.items()}
    jobs = make_jobs(folder, model_document(names), job, job)
    plan = build_plan(jobs.source, jobs.destination, jobs.topology(None, False), "reshard", staging=1 << 20)
    target = folder / "valid"
    target.mkdir()
    whole = {name: one.contiguous() for name, one in TENSORS.items()}
    if kind == "safetensors":
        save_file(whole, target / "model.safetensors")
        return Subject(
            target, plan, "model.safetensors", [*PLAIN, broken_header, broken_header, broken_header]
        )
    if kind == "index":
        parts = [dict(list(whole.items())[:3]), dict(list(whole.items())[3:])]
        weight_map = {}
        for number, part in enumerate(parts):
            save_file(part, target / f"model-{number}.safetensors")
            weight_map |= dict.fromkeys(part, f"model-{number}.safetensors")
        (target / "model.safetensors.index.json").write_text(
            json.dumps({"metadata": {"n": 1}, "weight_map": weight_map})
        )
        return Subject(
            target, plan, "model.safetensors.index.json", [*PLAIN, broken_json, broken_json, broken_json]
        )
    if kind == "rank-folder":
        experts = torch.stack([whole.pop("experts.0.w"), whole.pop("experts.1.w")])
        save_file(
            whole | {f"experts.{i}.w": one.clone() for i, one in enumerate(experts)},
            target / "rank-00000.safetensors",
        )
        return Subject(
            target, plan, "rank-00000.safetensors", [*PLAIN, broken_header, broken_header, broken_header]
        )
    dcp.save({"model": dict(TENSORS), "step": 3}, checkpoint_id=target)
    if kind == "dcp-metadata":
        return Subject(
            target,
            plan,
            ".metadata",
            [*PLAIN, insert_opcodes, insert_opcodes, broken_metadata, broken_metadata],
        )
    assert kind == "distcp"
    return Subject(
        target,
        plan,
        "__0_0.distcp",
        [*PLAIN, broken_zip, broken_zip, broken_inner_pickle, broken_inner_pickle],
    )


def read_everything(folder: Path, plan: Plan) -> None:
    """Read a folder as a model and as a source, every element."""
    if not is_rank_folder(folder):
        # what was read can be said and written
        model_document_text(read_model(folder, trust=True), "model").encode()
    source, _ = open_source(str(folder), plan, [0], 1, allow_extra=True, trust=True)
    for pair in plan.pairs:
        count = sum(
            values.numel() for _, _, values in source.windows(pair.name, (0,) * len(pair.shape), pair.shape)
        )
        assert count == torch.Size(pair.shape).numel(), f"{pair.name}: {count} elements of {pair.shape}"


def on_alarm(number: int, frame: object) -> None:
    raise TimeoutError(f"longer than {LONGEST} s")


def main() -> int:
    kind, count, seed = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    signal.signal(signal.SIGALRM, on_alarm)
    with tempfile.TemporaryDirectory() as name:
        subject = subject_of(kind, Path(name))
        read_everything(subject.folder, subject.plan)
        valid = (subject.folder / subject.file).read_bytes()
        now = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (now + ROOM, resource.getrlimit(resource.RLIMIT_AS)[1]))
        refused = most = 0
        for number in range(seed, seed + count):
            random = Random(number)
            data = random.choice(subject.breakers)(valid, random)
            target = Path(name) / "broken"
            shutil.copytree(subject.folder, target)
            (target / subject.file).write_bytes(data)
            measured = number % 8 == 0
            try:
                signal.alarm(LONGEST)
                if measured:
                    template_of.cache_clear()  # it grows by what other inputs have left
                    tracemalloc.start()
                read_everything(target, subject.plan)
            except ReshardError as error:
                assert error.exit_code in (2, 3), error
                refused += 1
            except BaseException:  # noqa: BLE001
                # whatever it is, it is what this run looks for
                traceback.print_exc()
                kept = Path(tempfile.gettempdir()) / f"fuzz-{kind}-{number}"
                kept.write_bytes(data)
                print(f"input {number} of {kind} is kept in {kept}", file=sys.stderr)
                return 1
            finally:
                signal.alarm(0)
            if measured:
                peak = tracemalloc.get_traced_memory()[1]
                tracemalloc.stop()
                size = len(data) + sum(one.stat().st_size for one in subject.folder.iterdir())
                assert peak <= BYTES_BESIDE + BYTES_PER_BYTE * size, (
                    f"input {number}: {peak} bytes for {size}"
                )
                most = max(most, peak)
            shutil.rmtree(target)
    print(
        json.dumps(
            {"format": kind, "inputs": count, "refused": refused, "read": count - refused, "peak": most}
        )
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
