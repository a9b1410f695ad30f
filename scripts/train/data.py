"""Training text: the Python sources inside pinned wheels of permissive packages.

    python scripts/train/data.py download        # pip fetches the wheels named in packages.json
    python scripts/train/data.py build           # wheels -> shards and sources.json

A shard is an xz file of JSON lines ``{"pkg", "path", "text"}``. Files keep their order inside a
package, so that a long training window sees neighbouring modules. Two whole packages and two per
cent of all other files are held out. Only weights are shipped, never this text.
"""

from __future__ import annotations

import argparse
import hashlib
import io
import json
import lzma
import re
import subprocess
import sys
import zipfile
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from email.parser import HeaderParser
from pathlib import Path

HERE = Path(__file__).parent
WORK = HERE.parents[1] / ".train"
PLATFORMS = (
    "manylinux_2_28_x86_64",
    "manylinux_2_27_x86_64",
    "manylinux_2_17_x86_64",
    "manylinux2014_x86_64",
)
MAX_PACKAGE_BYTES = 11_000_000
MAX_FILE_BYTES = 120_000
MIN_FILE_BYTES = 300
SHARDS = 12
HELD_OUT_PERCENT = 2
SKIP_PARTS = {
    "_vendor",
    "vendor",
    "vendored",
    "_vendored",
    "_extern",
    "extern",
    "locale",
    "static",
    "node_modules",
}
SKIP_NAMES = re.compile(
    r"(_pb2(_grpc)?\.py|_lookup.*\.py|unicode.*\.py|.*entities\.py|.*_data\.py|parsetab\.py|lextab\.py)$"
)


def packages() -> dict:
    """The pinned list: version, licence and sha256 by name, and which names are held out."""
    return json.loads((HERE / "packages.json").read_text())


def download(wheels: Path) -> None:
    """Fetch every pinned wheel with pip, without dependencies."""
    wheels.mkdir(parents=True, exist_ok=True)
    base = [
        sys.executable,
        "-m",
        "pip",
        "download",
        "-q",
        "--no-deps",
        "--only-binary=:all:",
        "-d",
        str(wheels),
    ]
    base += ["--python-version", "3.12", "--implementation", "cp"]
    for platform in PLATFORMS:
        base += ["--platform", platform]
    for name, pin in packages()["wheels"].items():
        subprocess.run([*base, f"{name}=={pin['version']}"], check=True)


def licence(archive: zipfile.ZipFile) -> str:
    """The licence a wheel declares: its expression, else its classifiers, else the free field."""
    meta = next(n for n in archive.namelist() if n.endswith(".dist-info/METADATA"))
    header = HeaderParser().parsestr(archive.read(meta).decode("utf-8", "replace"))
    if header["License-Expression"]:
        return header["License-Expression"]
    classes = [
        c.split("::")[-1].strip()
        for c in header.get_all("Classifier", [])
        if c.startswith("License")
    ]
    named = [c for c in classes if c != "OSI Approved"]
    free = (header["License"] or "").strip().splitlines()
    return "; ".join(named) or (free[0][:80] if free else "unstated")


def wanted(name: str, size: int) -> bool:
    """Whether a member of a wheel is source worth learning from, judged by its name and size."""
    if not name.endswith((".py", ".rst", ".md")) or ".dist-info/" in name or ".data/" in name:
        return False
    parts = name.split("/")
    return (
        MIN_FILE_BYTES <= size <= MAX_FILE_BYTES
        and not SKIP_PARTS.intersection(parts)
        and not SKIP_NAMES.search(parts[-1].lower())
    )


def readable(text: str) -> bool:
    """Whether text is written by hand: no long lines, not mostly digits or non-ASCII."""
    lines = text.splitlines()
    if not lines or max(map(len, lines)) > 600 or len(text) / len(lines) > 80:
        return False
    digits = sum(c.isdigit() for c in text)
    other = sum(ord(c) > 126 for c in text)
    return digits < 0.12 * len(text) and other < 0.02 * len(text)


def fingerprint(text: str) -> str:
    """Hash of text without white space: equal for copies that differ in layout only."""
    return hashlib.sha256(re.sub(r"\s+", "", text).encode()).hexdigest()


def rows(wheel: Path) -> Iterator[dict]:
    """All usable files of one wheel, in path order."""
    pkg = wheel.name.split("-")[0].lower()
    with zipfile.ZipFile(wheel) as archive:
        for info in sorted(archive.infolist(), key=lambda i: i.filename):
            if not wanted(info.filename, info.file_size):
                continue
            try:
                text = archive.read(info).decode("utf-8").replace("\r\n", "\n")
            except UnicodeDecodeError:
                continue
            if readable(text):
                yield {"pkg": pkg, "path": info.filename, "text": text}


def choose(found: list[dict], seen: set[str]) -> list[dict]:
    """Drop copies, then keep a hash-chosen part when the package is over its share."""
    kept = []
    for row in found:
        row["mark"] = fingerprint(row["text"])
        if row["mark"] not in seen:
            seen.add(row["mark"])
            kept.append(row)
    total = sum(len(r["text"]) for r in kept)
    share = min(1.0, MAX_PACKAGE_BYTES / max(total, 1))
    return [r for r in kept if int(r["mark"][:8], 16) < share * 2**32]


def write_shard(path: Path, shard: list[dict]) -> str:
    """Write one xz shard; return its sha256."""
    out = io.BytesIO()
    filters = [{"id": lzma.FILTER_LZMA2, "preset": 6, "dict_size": 1 << 26}]
    with lzma.open(out, "wt", format=lzma.FORMAT_XZ, filters=filters, encoding="utf-8") as file:
        for row in shard:
            file.write(
                json.dumps({k: row[k] for k in ("pkg", "path", "text")}, ensure_ascii=False) + "\n"
            )
    path.write_bytes(out.getvalue())
    return hashlib.sha256(out.getvalue()).hexdigest()


def read_shard(path: Path) -> list[dict]:
    """The rows of one shard."""
    with lzma.open(path, "rt", encoding="utf-8") as file:
        return [json.loads(line) for line in file]


def build(wheels: Path, corpus: Path) -> None:
    """Make the corpus shards, the held-out shard and ``sources.json``."""
    corpus.mkdir(parents=True, exist_ok=True)
    pins = packages()
    held_names = {n.lower().replace("-", "_") for n in pins["held_out"]}
    seen: set[str] = set()
    train: list[list[dict]] = []
    held: list[dict] = []
    sources = []
    for wheel in sorted(wheels.glob("*.whl"), key=lambda p: p.name.lower()):
        name, version = wheel.name.split("-")[:2]
        mark = hashlib.sha256(wheel.read_bytes()).hexdigest()
        if mark != pins["wheels"].get(name, {}).get("sha256"):
            raise ValueError(f"{wheel.name} is not the pinned file")
        kept = choose(list(rows(wheel)), seen)
        whole = name.lower() in held_names
        out = [r for r in kept if whole or int(r["mark"][8:12], 16) % 100 < HELD_OUT_PERCENT]
        marks = {r["mark"] for r in out}
        train.append([r for r in kept if r["mark"] not in marks])
        held += out
        with zipfile.ZipFile(wheel) as archive:
            terms = licence(archive)
        size = sum(len(r["text"].encode()) for r in train[-1])
        sources.append(
            {
                "name": name,
                "version": version,
                "licence": terms,
                "held_out": whole,
                "training_bytes": size,
                "wheel_sha256": mark,
            }
        )
    groups: list[list[dict]] = [[] for _ in range(SHARDS)]
    load = [0] * SHARDS
    for rows_ in sorted(train, key=lambda r: -sum(len(x["text"]) for x in r)):
        slot = load.index(min(load))
        groups[slot] += rows_
        load[slot] += sum(len(x["text"]) for x in rows_)
    jobs = {f"train-{i:02d}.jsonl.xz": g for i, g in enumerate(groups)} | {
        "held-out.jsonl.xz": held
    }
    with ProcessPoolExecutor(2) as pool:
        hashes = pool.map(write_shard, [corpus / n for n in jobs], jobs.values())
    record = {
        "wheels": sources,
        "shards": dict(zip(jobs, hashes, strict=True)),
        "training_bytes": sum(load),
        "held_out_bytes": sum(len(r["text"].encode()) for r in held),
        "held_out_files": len(held),
    }
    (corpus / "sources.json").write_text(json.dumps(record, indent=1) + "\n")
    print(
        json.dumps({k: v for k, v in record.items() if k not in ("wheels", "shards")}),
        file=sys.stderr,
    )


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("step", choices=("download", "build"))
    parser.add_argument("--work", type=Path, default=WORK)
    args = parser.parse_args()
    if args.step == "download":
        download(args.work / "wheels")
    else:
        build(args.work / "wheels", args.work / "corpus")


if __name__ == "__main__":
    main()
