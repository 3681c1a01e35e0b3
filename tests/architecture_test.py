"""The layers: a module imports only from lower layers or from its own folder. Read from the source, not run."""

import ast
import pathlib
import subprocess
import sys

import pytest

ROOT = pathlib.Path(__file__).parents[1]

LAYERS = {
    "pagedjax_kernels": 0,
    "types": 1,
    "config": 1,
    "errors": 1,
    "options": 1,
    "help_text": 1,
    "command_line": 1,
    "flags": 1,
    "folders": 1,
    "pages": 2,
    "policy": 2,
    "nn": 3,
    "sampling": 3,
    "models": 4,
    "weights": 5,
    "runner": 5,
    "scheduler": 5,
    "engine": 6,
    "simulate": 6,
    "planning": 6,
    "benchmarking": 7,
    "server": 7,
    "serve": 8,
    "generate": 8,
    "convert": 8,
    "snapshot": 8,
    "bench": 8,
    "capacity": 8,
    "": 9,  # pagedjax itself: what users import
}
COMMANDS = 8
"""From this layer on, a module stands for itself: commands do not import one another."""

FOUNDATION = 1
"""The modules of this layer are one folder in spirit: they may import one another."""

KERNELS_MAY_IMPORT = {"jax", "jaxlib", "jax_triton", "triton", "numpy", "pagedjax_kernels"}

HOST_ONLY = ("types", "errors", "options", "config", "scheduler", "pages/capacity.py", "pages/schemes.py")
"""These never touch a device array, so they do not import JAX either."""

SOURCES = sorted((ROOT / "pagedjax").rglob("*.py")) + sorted((ROOT / "kernels").rglob("*.py"))


def name_of(path: pathlib.Path) -> str:
    """The dotted name of a module."""
    base = ROOT / "kernels" if (ROOT / "kernels") in path.parents else ROOT
    parts = path.relative_to(base).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


MODULES = {name_of(path) for path in SOURCES}


def imports_of(path: pathlib.Path) -> list[tuple[int, str]]:
    """(line, module) for each import anywhere in a file, also those inside functions."""
    found = []
    for node in ast.walk(ast.parse(path.read_text(), str(path))):
        if isinstance(node, ast.Import):
            found += [(node.lineno, alias.name) for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}:{node.lineno}: relative import"
            for alias in node.names:
                # `from pagedjax import pages` names a module, `from pagedjax.pages import alloc` may name one too.
                full = f"{node.module}.{alias.name}"
                found.append((node.lineno, full if full in MODULES else str(node.module)))
    return found


def folder_of(module: str) -> str | None:
    """The key of LAYERS that a module belongs to; None for modules of others."""
    parts = module.split(".")
    if parts[0] == "pagedjax_kernels":
        return "pagedjax_kernels"
    if parts[0] != "pagedjax":
        return None
    return parts[1] if len(parts) > 1 else ""


def layer_of(module: str) -> int:
    """The layer of one of our modules; `python -m pagedjax.simulate` is a command inside a package."""
    folder = folder_of(module)
    assert folder in LAYERS, f"{module}: give it a layer in {pathlib.Path(__file__).name}"
    return COMMANDS if module.endswith(".__main__") else LAYERS[folder]


@pytest.mark.parametrize("path", SOURCES, ids=name_of)
def test_imports_go_down(path):
    module = name_of(path)
    wrong = []
    for line, target in imports_of(path):
        folder = folder_of(target)
        if folder is None or folder == folder_of(module):
            continue
        mine, theirs = layer_of(module), layer_of(target)
        if not (theirs < mine or theirs == mine == FOUNDATION):
            wrong.append(f"{path.relative_to(ROOT)}:{line}: layer {mine} imports {target} of layer {theirs}")
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize("path", [p for p in SOURCES if ROOT / "kernels" in p.parents], ids=name_of)
def test_kernels_stand_alone(path):
    foreign = {
        target
        for _, target in imports_of(path)
        if target.split(".")[0] not in KERNELS_MAY_IMPORT | sys.stdlib_module_names
    }
    assert not foreign, f"{path.relative_to(ROOT)} imports {sorted(foreign)}"


@pytest.mark.parametrize("place", HOST_ONLY)
def test_host_code_does_not_import_jax(place):
    path = ROOT / "pagedjax" / place
    paths = list(path.rglob("*.py")) if path.is_dir() else [path if path.suffix else path.with_suffix(".py")]
    assert paths
    for source in paths:
        heavy = [target for _, target in imports_of(source) if target.split(".")[0] in ("jax", "jaxlib", "flax")]
        assert not heavy, f"{source.relative_to(ROOT)} imports {heavy}"


@pytest.mark.smoke
@pytest.mark.parametrize("module", ["pagedjax.types", "pagedjax.config"])
def test_requests_can_be_described_without_jax(module):
    code = f"import sys, {module}; sys.exit('jax was imported' if 'jax' in sys.modules else 0)"
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT, timeout=60, check=False).returncode == 0
