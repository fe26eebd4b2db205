"""Several real processes on one machine: the same run as in one process, and an end in time when one of them dies."""

import json
import shlex
import signal
import time

import jax
import numpy as np
import pytest
from launching import EXPERIMENTS, ROOT, by_flags, finish, launch, load, outcomes, start_together

from jaxpg import recipe
from jaxpg.parallel import distributed, sharding
from jaxpg.run.checkpoint import Checkpointer
from jaxpg.run.metrics import read_jsonl

MESH = "data=2,fsdp=2,tensor=2"


def start(folder, count, *, found=by_flags, arguments=()):
    scorer = ("--scorers", "own_scorers:wrong_in_one")
    options = ("--smoke", *scorer, "--mesh", MESH, "--run-dir", str(folder), *arguments)
    return start_together(ROOT / "tests" / "run_grpo.py", *options, count=count, found=found)


def by_open_mpi(i, count, port):
    told = {"OMPI_MCA_orte_hnp_uri": "4096.0;tcp://127.0.0.1:1", "JAX_COORDINATOR_PORT": str(port)}
    told |= {
        f"OMPI_COMM_WORLD_{name}": str(value) for name, value in {"SIZE": count, "RANK": i, "LOCAL_RANK": i}.items()
    }
    return ["--distributed"], told


def by_slurm(i, count, port):
    told = {"JOB_ID": 1, "STEP_NODELIST": "localhost", "NTASKS": count, "PROCID": i, "LOCALID": i, "STEP_NUM_NODES": 1}
    return ["--distributed"], {f"SLURM_{k}": str(v) for k, v in told.items()} | {"JAX_COORDINATOR_PORT": str(port)}


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    folder = tmp_path_factory.mktemp("alone") / "run"
    finish(start(folder, 1))
    return folder


def saved(folder):
    """Names, shapes and options of the last checkpoint."""
    record = max((folder / "checkpoints" / "rl").glob("*/record"), key=lambda path: int(path.parent.name))
    return json.loads(next(record.glob("metadata*")).read_text())


@pytest.fixture(scope="module")
def parameters(tmp_path_factory):
    """Reads those of a run's last checkpoint, onto one device."""
    grpo = load(EXPERIMENTS / "ladder" / "grpo.py")
    like = recipe.prepare(grpo.Config(smoke=True, run_dir=tmp_path_factory.mktemp("like")), name="grpo").params()
    return lambda folder: Checkpointer(folder / "checkpoints" / "rl", read_only=True).restore_params(like)


def assert_same_but_for_rounding(array, expected):
    """A whole array to 2e-6 of its length, each element to 0.5 % of one of Adam's steps (7e-4).

    Adam divides each gradient by its own size: where it is all but zero, it is rounding that decides how far to go
    (seen: 1.4e-6 with JAX 0.12).
    """
    array, expected = np.asarray(array), np.asarray(expected)
    assert np.linalg.norm(array - expected) <= 2e-6 * np.linalg.norm(expected)
    np.testing.assert_allclose(array, expected, rtol=1e-5, atol=3e-6)


@pytest.mark.parametrize(
    ("count", "found"),
    [(2, by_open_mpi), pytest.param(4, by_slurm, marks=pytest.mark.exhaustive)],  # the same, with fewer devices each
)
def test_processes_do_together_what_one_does_alone(count, found, alone, parameters, tmp_path):
    """Samples, scores, losses, gradients: all that is logged, and the parameters. Sums may round otherwise."""
    finish(start(tmp_path / "run", count, found=found))
    together, expected = read_jsonl(tmp_path / "run" / "metrics.jsonl"), read_jsonl(alone / "metrics.jsonl")
    assert [row.keys() for row in together] == [row.keys() for row in expected]
    assert any(0 < row.get("reward", 0) < 1 and row["grad_norm"] > 0 for row in together)
    for row, wanted in zip(together, expected, strict=True):
        for name, value in row.items():
            if "seconds" not in name and name != "log_prob_gap" and not isinstance(value, str):
                np.testing.assert_allclose(value, wanted[name], rtol=1e-5, atol=1e-7, err_msg=f"{row['step']} {name}")
    here, there = saved(tmp_path / "run"), saved(alone)
    assert here["arrays"] == there["arrays"]
    jax.tree.map(assert_same_but_for_rounding, *map(parameters, (tmp_path / "run", alone)))


def test_a_run_goes_on_with_another_number_of_processes(alone, tmp_path):
    """Stopped in the midst by two, ended by one."""
    folder = tmp_path / "run"
    stopped = ("--stop-after", "3", "--checkpoint-every", "1")
    finish(start(folder, 2, arguments=stopped))
    assert not (folder / "summary.json").exists()
    finish(start(folder, 1, arguments=("--resume",)))
    found, expected = read_jsonl(folder / "metrics.jsonl"), read_jsonl(alone / "metrics.jsonl")
    assert [row["step"] for row in found] == [row["step"] for row in expected]
    np.testing.assert_allclose(found[-2]["loss"], expected[-2]["loss"], rtol=1e-4, atol=1e-7)
    assert found[-2]["reward"] == expected[-2]["reward"]


def test_when_one_dies_the_others_end_in_time_and_say_so(tmp_path):
    folder = tmp_path / "run"
    survivor, victim = start(folder, 2)
    while not (folder / "metrics.jsonl").exists() and survivor.poll() is None:
        time.sleep(0.1)
    assert survivor.poll() is None
    victim.send_signal(signal.SIGKILL)
    victim.communicate()
    died = time.monotonic()
    said, _ = survivor.communicate(timeout=120)
    assert time.monotonic() - died < 120 and survivor.returncode != 0
    assert any(word in said for word in ("heartbeat", "Connection closed by peer", "unhealthy", "died")), said[-3000:]


@pytest.mark.parametrize(
    ("asked", "phase"),
    [((0,), "rl"), pytest.param((0, 1), "warmup", marks=pytest.mark.exhaustive)],  # at the very end of a phase
)
def test_sigterm_to_some_stops_all_after_the_same_step(asked, phase, tmp_path):
    """Also where it comes with the last step of a phase, after which steps are counted from 1 again."""
    folder = tmp_path / "run"
    processes = start(folder, 2)
    path = folder / "metrics.jsonl"
    last = ("rl", 1) if phase == "rl" else ("warmup", 2)
    while all(process.poll() is None for process in processes):
        if last in [(row["phase"], row["step"]) for row in (read_jsonl(path) if path.exists() else [])]:
            break
        time.sleep(0.02)
    for i in asked:
        processes[i].send_signal(signal.SIGTERM)
    ended = list(outcomes(processes))
    assert [code for code, _ in ended] == [143, 143], ended
    assert "SIGTERM: saved after step" in ended[0][1]
    assert not (folder / "summary.json").exists()
    finish(start(folder, 1, arguments=("--resume",)))
    assert (folder / "summary.json").exists()


def test_processes_with_different_options_are_told_and_none_waits(tmp_path):
    own = [["--mesh", "data=8"], ["--mesh", "fsdp=8", "--seed", "3"]]

    def found(i, *others):
        flags, told = by_flags(i, *others)
        return [*flags, *own[i]], told

    common = ("--smoke", "--run-dir", str(tmp_path / "run"))
    for code, said in list(outcomes(start_together(EXPERIMENTS / "ladder" / "grpo.py", *common, count=2, found=found))):
        assert code == 2, said
        assert "mesh is 'data=8' in process 0 and 'fsdp=8' in process 1; seed is '0' in process 0" in said
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("where", "process"),
    [
        *(("prepare", 0), ("prepare", 1), ("scorer", 1), ("interrupt", 1), ("bug", 1)),
        # The process that writes, which ends in the same way.
        *(pytest.param(where, 0, marks=pytest.mark.exhaustive) for where in ("scorer", "interrupt")),
    ],
)
def test_what_one_process_alone_meets_ends_all_in_time(where, process, tmp_path):
    def found(*of_process):
        return by_flags(*of_process)[0], {"WRONG_IN": str(process), "WRONG_WHERE": where}

    ended = list(outcomes(start(tmp_path / "run", 2, found=found)))
    if where == "prepare":
        assert [code for code, _ in ended] == [2, 2], ended
        assert all("error: --x is not here" in said for _, said in ended)
    elif where == "bug":
        assert all(code for code, _ in ended), ended
        assert "KeyError: 'a fault of ours'" in ended[process][1]
    elif where == "interrupt":
        assert ended[process][0] == 130 and ended[1 - process][0], ended
        assert "KeyboardInterrupt" in ended[process][1]
    else:
        assert all(code for code, _ in ended), ended
        assert "scorer 'own_scorers:wrong_in_one' failed" in ended[process][1] and "no compiler" in ended[process][1]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"coordinator": "a:1"},
            "--num-processes is missing: give --coordinator, --num-processes, --process-id together",
        ),
        ({"coordinator": "a:1", "num_processes": 2, "process_id": 2}, "--process-id=2: must be from 0 to 1"),
        ({"coordinator": "a", "num_processes": 2, "process_id": 1}, "--coordinator=a: must be host:port"),
    ],
)
def test_mistakes_are_named_before_anybody_waits(options, message):
    with pytest.raises(ValueError, match=message):
        distributed.initialize(**options)


def test_a_lonely_process_is_told_so(tmp_path):
    result = launch(ROOT / "tests" / "run_grpo.py", "--smoke", "--distributed", "--run-dir", str(tmp_path / "run"))
    assert result.returncode == 2, result.stderr
    assert "error: --distributed: the environment tells of no other processes" in result.stderr
    assert not (tmp_path / "run").exists()


def test_one_process_has_all_rows():
    mesh = sharding.make_mesh(MESH)
    assert distributed.local_rows(mesh, 8).tolist() == list(range(8))
    rows = np.arange(24.0).reshape(8, 3)
    spread = sharding.put_whole(mesh, {"a": rows})["a"]
    assert spread.sharding == sharding.rows(mesh)
    for back in (distributed.local(spread), distributed.fetch(spread), distributed.gather(mesh, rows)):
        np.testing.assert_array_equal(back, rows)
    assert distributed.pick_local(mesh, list("abcdefgh")) == list("abcdefgh")


def test_the_pod_launcher_prints_what_it_would_do():
    options, grpo = ("--name", "my pod", "--zone", "z", "--project", "p"), "experiments/ladder/grpo.py"
    result = launch(ROOT / "tools" / "launch_pod.py", *options, "--", "python", grpo, "--seed", "1")
    assert result.returncode == 0, result.stderr
    line = shlex.split(result.stdout)
    assert line[:6] == ["gcloud", "compute", "tpus", "tpu-vm", "ssh", "my pod"]
    assert line[6:-2] == ["--zone", "z", "--project", "p", "--worker=all"]
    assert line[-1].endswith("&& python experiments/ladder/grpo.py --seed 1 --distributed")
    result = launch(ROOT / "tools" / "launch_pod.py", *options, "--directory", "~/a b", "--", "python", "x.py")
    assert shlex.split(result.stdout)[-1].startswith("cd ~/'a b' && ")
    result = launch(ROOT / "tools" / "launch_pod.py", "--name", "", "--zone", "z", "--", "python", "x.py")
    assert result.returncode == 2 and result.stderr.startswith("error: --name is empty: say which")
    result = launch(ROOT / "tools" / "launch_pod.py", *options, "--", "ls")
    assert result.returncode == 2 and result.stderr.startswith("error: command='ls': give a Python file after --")
