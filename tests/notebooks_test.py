"""The notebooks run from top to bottom, draw their figures, and are kept without outputs."""

import json
import os
import re
import sys
from pathlib import Path

import nbclient
import nbformat
import pytest

NOTEBOOKS = sorted((Path(__file__).parents[1] / "notebooks").glob("*.ipynb"))
NUM_FIGURES = {
    "1_page_table_tour": 15,
    "2_paged_attention_in_your_model": 4,
    "3_batching_and_prefix_sharing": 3,
    "4_the_papers_figures": 2,
    "5_scheduling_policies": 1,
    "6_snapshot_fork_replay": 2,
}
REAL_MODEL = ("3_batching_and_prefix_sharing", "6_snapshot_fork_replay")
MOSTLY_COMPILED = ("1_page_table_tour", "5_scheduling_policies")
"""Compiling takes most of their time, so that less optimised programs are ready sooner; the others would run longer."""
CELL_TIMEOUT_S = 400  # a stuck cell, not a slow machine

each_notebook = pytest.mark.parametrize(
    "path",
    [pytest.param(path, marks=[pytest.mark.model] if path.stem in REAL_MODEL else []) for path in NOTEBOOKS],
    ids=lambda path: path.stem,
)


def read(path: Path) -> nbformat.NotebookNode:
    notebook = nbformat.read(path, as_version=nbformat.NO_CONVERT)
    nbformat.validate(notebook)
    return notebook


@pytest.fixture
def kernel_of_this_interpreter(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """The name of a kernel that is this interpreter, whatever else is installed under the name python3."""
    folder = tmp_path / "jupyter" / "kernels" / "python3"
    folder.mkdir(parents=True)
    command = [sys.executable, "-m", "ipykernel_launcher", "-f", "{connection_file}"]
    (folder / "kernel.json").write_text(json.dumps({"argv": command, "display_name": "here", "language": "python"}))
    monkeypatch.setenv("JUPYTER_PATH", str(tmp_path / "jupyter"))
    monkeypatch.setenv("JUPYTER_PREFER_ENV_PATH", "0")
    monkeypatch.setenv("IPYTHONDIR", str(tmp_path / "ipython"))
    monkeypatch.delenv("MPLBACKEND", raising=False)
    # Shorter answers, trainings and bursts.
    monkeypatch.setenv("PAGEDJAX_SMALL_NOTEBOOKS", "1")
    return "python3"


def test_all_are_there():
    assert [path.stem for path in NOTEBOOKS] == list(NUM_FIGURES)


@each_notebook
def test_is_stripped_and_ready_for_colab(path: Path):
    notebook = read(path)
    assert (notebook.nbformat, notebook.nbformat_minor) == (4, 5)
    assert notebook.metadata.kernelspec.name == "python3"
    code = [cell for cell in notebook.cells if cell.cell_type == "code"]
    for cell in code:
        assert cell.outputs == [], f"cell {cell.id} has outputs"
        assert cell.execution_count is None, f"cell {cell.id} was saved after a run"
    ids = [cell.id for cell in notebook.cells]
    assert len(set(ids)) == len(ids)
    install = code[0].source
    assert 'if importlib.util.find_spec("pagedjax") is None' in install
    assert "git+https://github.com/pagedjax/pagedjax" in install
    assert not re.search(r"--editable|\s-e\s|index-url", install)
    assert f"github/pagedjax/pagedjax/blob/main/notebooks/{path.name}" in notebook.cells[0].source


@each_notebook
def test_runs(path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kernel_of_this_interpreter: str):
    if path.stem in MOSTLY_COMPILED:
        monkeypatch.setenv("XLA_FLAGS", f"{os.environ.get('XLA_FLAGS', '')} --xla_backend_optimization_level=0")
    notebook = read(path)
    # Away from the repository, so that the installed package is what runs. A cell that fails raises, with its output.
    nbclient.NotebookClient(
        notebook,
        timeout=CELL_TIMEOUT_S,
        kernel_name=kernel_of_this_interpreter,
        resources={"metadata": {"path": str(tmp_path)}},
    ).execute()
    outputs = [output for cell in notebook.cells if cell.cell_type == "code" for output in cell.outputs]
    assert [output for output in outputs if output.output_type == "error"] == []
    figures = [output for output in outputs if "image/png" in output.get("data", {})]
    assert len(figures) == NUM_FIGURES[path.stem]
