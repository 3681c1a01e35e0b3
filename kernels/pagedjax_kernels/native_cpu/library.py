"""Builds the shared library for this machine, keeps it, and registers its ops with XLA."""

from __future__ import annotations

import ctypes
import functools
import hashlib
import logging
import os
import pathlib
import platform
import shutil
import subprocess
import tempfile

import jax
import jaxlib

from pagedjax_kernels.folders import cache_folder

logger = logging.getLogger("pagedjax_kernels")

SOURCES = pathlib.Path(__file__).parent / "src"
FLAGS = ("-O3", "-mprefer-vector-width=512", "-std=c++17", "-shared", "-fPIC", "-fno-math-errno", "-w")
TARGETS = ("pagedjax_paged_attention", "pagedjax_kv_update")
TIMEOUT_SECONDS = 300


def why_not() -> str | None:
    """The reason why the library cannot be had here, or None once it is loaded. Builds it at the first call."""
    return _load()


@functools.cache
def _load() -> str | None:
    if os.environ.get("PAGEDJAX_NATIVE", "1") == "0":
        return "switched off by PAGEDJAX_NATIVE=0"
    compiler = _compiler()
    if compiler is None:
        return "no C++ compiler: install g++ or clang++, or name one in the environment variable CXX"
    try:
        library = ctypes.CDLL(str(_built(compiler)))
        for target in TARGETS:
            jax.ffi.register_ffi_target(target, jax.ffi.pycapsule(getattr(library, target)), platform="cpu")
    except subprocess.CalledProcessError as error:
        lines = (error.stderr or "").strip().splitlines()
        return f"{compiler} cannot build it: {next((x for x in lines if 'error' in x), lines[-1] if lines else error)}"
    except (OSError, subprocess.TimeoutExpired) as error:
        return f"{compiler} cannot build it: {error}"
    return None


def _compiler() -> str | None:
    named = os.environ.get("CXX")
    return shutil.which(named) if named else shutil.which("g++") or shutil.which("clang++")


def _built(compiler: str) -> pathlib.Path:
    """Path of the library for these sources, this compiler, this jaxlib and this processor; builds it where it lacks."""
    path = cache_folder("native") / f"pagedjax_native_{_key(compiler)}.so"
    if path.exists():
        return path
    logger.info("building the native CPU kernels with %s (a few seconds, once)", compiler)
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=path.parent) as folder:
        target = pathlib.Path(folder) / path.name
        native = "-mcpu=native" if platform.machine() in ("aarch64", "arm64") else "-march=native"
        command = [
            compiler,
            *FLAGS,
            native,
            "-I",
            jax.ffi.include_dir(),
            str(SOURCES / "library.cc"),
            "-o",
            str(target),
        ]
        subprocess.run(command, check=True, capture_output=True, text=True, timeout=TIMEOUT_SECONDS)
        target.replace(path)  # at once: another process may be doing the same
    return path


def _key(compiler: str) -> str:
    version = subprocess.run([compiler, "--version"], check=True, capture_output=True, text=True, timeout=60).stdout
    digest = hashlib.sha256("\0".join([version, *FLAGS, jaxlib.__version__, _processor()]).encode())
    for source in sorted(SOURCES.iterdir()):
        digest.update(source.read_bytes())
    return digest.hexdigest()[:16]


def _processor() -> str:
    """What -march=native depends on: a home folder may be shared by different machines."""
    try:
        text = pathlib.Path("/proc/cpuinfo").read_text()
    except OSError:
        return platform.processor() or platform.machine()
    kept = ("flags", "Features", "model name", "CPU implementer", "CPU part", "cpu family", "model")
    lines = (line for line in text.splitlines() if line.split(":")[0].strip() in kept)
    return platform.machine() + "\n".join(sorted(set(lines)))
