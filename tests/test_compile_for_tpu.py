"""The update and the sampler, compiled for TPUs that are not there, each in a process of its own."""

import importlib.util
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from launching import ROOT, load

hlo = load(ROOT / "tools" / "hlo.py")
TOOL = Path(__file__).parents[1] / "tools" / "compile_for_tpu.py"
SMALL = """
import runpy, sys
sys.path.insert(0, sys.argv[2])
from jaxpg.models import Config, presets
presets.PRESETS["small"] = Config(vocab_size=4096, hidden_size=1024, num_layers=4, num_heads=4, num_kv_heads=2,
                                  head_dim=128, mlp_size=4096, max_length=256)
runpy.run_path(sys.argv[1], run_name="__main__")
"""
SIZES = ["--sequences=16", "--group-size=4", "--length=128", "--prompt-length=64", "--num-microbatches=1"]
PROGRAM = ["--model=small", "--topology=v5e:2x2", "--attention=xla", *SIZES]

pytestmark = pytest.mark.skipif(importlib.util.find_spec("libtpu") is None, reason="needs libtpu (extra tpu-compile)")


def launch(*arguments: str) -> subprocess.CompletedProcess:
    code = SMALL.replace("sys.argv[1]", f"{str(TOOL)!r}").replace("sys.argv[2]", f"{str(TOOL.parent)!r}")
    command = [sys.executable, "-c", code, *arguments]
    quick = {"JAX_PLATFORMS": "cpu", "JAX_EXEC_TIME_OPTIMIZATION_EFFORT": "-1.0"}
    return subprocess.run(command, env=os.environ | quick, capture_output=True, text=True, timeout=900, check=False)


def compiled(folder: Path, *arguments: str) -> dict:
    path = folder / "numbers.json"
    done = launch(*PROGRAM, "--json", str(path), *arguments)
    assert done.returncode == 0, done.stderr[-2000:]
    assert "Compiled, not run" in done.stdout
    return json.loads(path.read_text())["programs"]


def test_update_and_sampler_and_what_fsdp_saves(tmp_path):
    cut = compiled(tmp_path, "--mesh", "fsdp=2,tensor=2", "--hlo", str(tmp_path))
    assert copies_of_a_cache((tmp_path / "sampler.txt").read_text()) == []
    assert set(cut) == {"update", "reshard", "sampler"} and all(found["fits"] for found in cut.values())
    for found in cut.values():
        assert sum(found["collective_bytes_by_kind"].values()) == pytest.approx(found["collective_bytes"])
        assert sum(found["collective_bytes_by_axis"].values()) == pytest.approx(found["collective_bytes"])
        assert found["seconds"]["total"] > 0
        memory = found["memory_bytes"]
        kinds = ("arguments", "outputs", "temporaries", "code", "held")
        assert memory["total"] == sum(memory[kind] for kind in kinds) - memory["aliased"]
    given = cut["update"]["memory_bytes"]["arguments"]  # parameters and both moments, and a few rows
    assert cut["update"]["loops_of_unknown_length"] == []
    held = [cut[name]["memory_bytes"]["held"] / given for name in ("update", "reshard", "sampler")]
    assert held == pytest.approx([0, 2 / 3, 1], rel=0.1), "the moments while parameters are moved, then all of it"
    assert any("fsdp" in axes for axes in cut["update"]["collective_bytes_by_axis"])
    # Weights are gathered once, in bfloat16, and not by the sampler.
    assert all("fsdp" in axes for axes in cut["reshard"]["collective_bytes_by_axis"])
    assert not any("fsdp" in axes for axes in cut["sampler"]["collective_bytes_by_axis"])
    assert cut["reshard"]["memory_bytes"]["outputs"] == pytest.approx(given / 3, rel=0.1), "one of three, twice, halved"

    whole = compiled(tmp_path, "--mesh", "data=2,tensor=2")
    assert set(whole) == {"update", "sampler"}, "on one mesh the sampler takes the parameters as they are"
    shares = [whole["sampler"]["memory_bytes"][kind] for kind in ("arguments", "held")]
    assert np.array(shares) / whole["update"]["memory_bytes"]["arguments"] == pytest.approx([1 / 3, 2 / 3], rel=0.1)
    given = [found["update"]["memory_bytes"]["arguments"] for found in (cut, whole)]
    assert given[0] == pytest.approx(given[1] / 2, rel=0.15)
    totals = [found["update"]["memory_bytes"]["total"] for found in (cut, whole)]
    assert totals[0] < totals[1] - 0.85 * (given[1] - given[0])


def copies_of_a_cache(text: str) -> list[str]:
    """Kernels that give a layer's keys or values, and run once a layer and step; all layers are written once a step."""
    steps, rows, heads = 63, 8, 1  # on one of data=2,tensor=2
    shape = re.compile(rf"bf16\[(?:\d+,)?{rows},{heads},(?:128,{steps}|{steps},128)\]")
    program = hlo.Program(text, assumed=steps)
    kernels = [(i, times) for _, i, times in program.instructions() if "estimated_cycles" in i.rest]
    assert any(times == 4 * steps for _, times in kernels), "layers are scanned"
    return [i.name for i, times in kernels if times > steps and shape.match(i.shape)]


@pytest.mark.parametrize(
    "arguments, message",
    [
        (("--mesh", "fdsp=4"), "there is no axis 'fdsp'"),
        (("--mesh", "fsdp=8"), "asks for 8 devices, this process sees 4"),
        (("--mesh", "data=-1", "--sequences", "6", "--group-size", "1"), "cannot be spread over data*fsdp=4"),
        (("--mesh", "tensor=4"), "not divisible by mesh axis tensor=4"),
        (("--programs",), "--programs is empty: name at least one"),
        (("--programs", "reshard", "--mesh", "data=4"), "update and sampler have one mesh, nothing is moved"),
        (("--attention", "cudnn"), "cudnn"),
        (("--json", f"{__file__}/numbers.json"), "--json: "),
        (("--hlo", __file__), "cannot be written (File exists), choose another folder"),
        (("--model", "gpt-2"), "there is no such preset"),
        (("--topology", "v4:2x2"), "must be <chip>:<sizes>"),
    ],
)
def test_mistakes_are_one_line(arguments, message):
    done = launch(*PROGRAM, *arguments)
    assert done.returncode == 2 and message in done.stderr and done.stderr.count("\n") == 1
