"""moeflow-gen as a subprocess: for set-up code and tests, never for serving."""
from __future__ import annotations

import json
import os
import shutil
import subprocess
from pathlib import Path

from . import library


def find() -> str:
    """MOEFLOW_GEN, else ../bin or ../../bin beside the library, else the one on PATH."""
    named = os.environ.get("MOEFLOW_GEN")
    if named:
        return named
    places = [library.loaded_path() or library.choose(None)]
    for place in places:
        for up in (1, 2):
            parents = Path(os.path.realpath(place)).parents
            if len(parents) > up and (parents[up] / "bin" / "moeflow-gen").exists():
                return str(parents[up] / "bin" / "moeflow-gen")
    found = shutil.which("moeflow-gen")
    if not found:
        raise FileNotFoundError("moeflow-gen was not found beside libmoeflow or on PATH: set MOEFLOW_GEN")
    return found


def run(*arguments: str) -> str:
    """Standard output; a failure raises RuntimeError with what it said on stderr."""
    done = subprocess.run([find(), *arguments], capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"moeflow-gen {arguments[0]} exits {done.returncode}: {done.stderr.strip()}")
    return done.stdout


def build(model: str, arch: str, dtype: str = "bf16", cache: str | None = None) -> dict:
    """Compiles what is missing of a model YAML into the cache; what `moeflow-gen build --format json` prints."""
    more = ("--cache", cache) if cache else ()
    return json.loads(run("build", model, "--arch", arch, "--dtype", dtype, "--format", "json", *more))


def spec_text(model: str, dtype: str = "bf16") -> str:
    """The canonical text of a model YAML, with which the CPU backend opens without a cache."""
    return run("explain", model, "--dtype", dtype, "--format", "spec")
