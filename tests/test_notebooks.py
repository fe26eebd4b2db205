"""Every notebook runs from top to bottom on this interpreter, and is committed without outputs."""

import os
import sys
from pathlib import Path

import nbformat
import pytest
from jupyter_client import AsyncKernelManager
from jupyter_client.kernelspec import KernelSpecManager
from nbclient import NotebookClient
from nbclient.exceptions import CellExecutionError

FOLDER = Path(__file__).parents[1] / "notebooks"
NOTEBOOKS = sorted(FOLDER.glob("*.ipynb"))


def execute(notebook, scratch: Path):
    """Runs all cells as a user on one device does; nothing is read from or written to the home folder."""
    environment = {name: x for name, x in os.environ.items() if name not in ("XLA_FLAGS", "MPLBACKEND")}
    environment |= {"IPYTHONDIR": str(scratch / "ipython"), "JAX_PLATFORMS": "cpu"}
    manager = AsyncKernelManager(
        kernel_name="python3",
        kernel_spec_manager=KernelSpecManager(kernel_dirs=[]),  # no installed kernel, so it is sys.executable's
        connection_file=str(scratch / "kernel.json"),
    )
    client = NotebookClient(notebook, km=manager, timeout=240, startup_timeout=120)
    return client.execute(env=environment, cwd=str(scratch), cleanup_kc=True)


def cells(notebook):
    return [cell for cell in notebook.cells if cell.cell_type == "code"]


@pytest.fixture(params=NOTEBOOKS, ids=lambda path: path.stem)
def path(request):
    return request.param


def test_there_are_notebooks():
    assert NOTEBOOKS


def test_a_notebook_is_committed_small_and_without_outputs(path):
    assert path.stat().st_size < 50_000
    notebook = nbformat.read(path, as_version=4)
    nbformat.validate(notebook)
    assert all(not cell.outputs and cell.execution_count is None for cell in cells(notebook))


def test_a_notebook_runs_without_errors_and_warnings(path, tmp_path):
    executed = execute(nbformat.read(path, as_version=4), tmp_path)
    assert all(cell.execution_count for cell in cells(executed)), "every cell ran"
    printed = [output for cell in cells(executed) for output in cell.outputs if output.output_type == "stream"]
    assert not [output.text for output in printed if output.name == "stderr"]


def test_the_runner_uses_this_interpreter_and_stops_at_an_error(tmp_path):
    notebook = nbformat.v4.new_notebook()
    for source in (f"import sys\nassert sys.executable == {sys.executable!r}", "raise KeyError('seen')"):
        notebook.cells.append(nbformat.v4.new_code_cell(source))
    with pytest.raises(CellExecutionError, match="seen"):
        execute(notebook, tmp_path)
