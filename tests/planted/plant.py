"""Plants the defects of defects.txt one by one into a copy of the tree and demands that the named tests notice."""

import argparse
import os
import pathlib
import shutil
import subprocess
import sys
import tempfile
import time

ROOT = pathlib.Path(__file__).resolve().parents[2]
TEST_SECONDS = 120  # a defect may make a test hang: that counts as caught, and is said
SKIPPED = 77


class Defect:
    def __init__(self, block):
        head, rest = block.split("\n--- find\n", 1)
        self.find, self.replace = rest.split("\n--- replace\n", 1)
        fields = dict(line.split(": ", 1) for line in head.strip().splitlines())
        self.name, self.what, self.file = fields["name"], fields["what"], fields["file"]
        self.tests = fields["tests"].split()


def read_defects():
    text = (ROOT / "tests/planted/defects.txt").read_text()
    blocks = text.split("\n=== defect\n")[1:]  # what stands before the first one explains the form
    defects = [Defect(block.rstrip("\n")) for block in blocks]
    names = [defect.name for defect in defects]
    if len(set(names)) != len(names):
        sys.exit("planted: two defects have one name")
    return defects


def copy_tree(to):
    """The files that git knows or would add; without git, all but build folders."""
    listing = subprocess.run(["git", "-C", str(ROOT), "ls-files", "-coz", "--exclude-standard"], capture_output=True)
    if listing.returncode == 0 and listing.stdout:
        names = [name for name in listing.stdout.decode().split("\0") if name]
        for name in names:
            if not (ROOT / name).is_file():
                continue  # deleted, not yet committed
            (to / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, to / name)
        return
    shutil.copytree(ROOT, to, dirs_exist_ok=True, ignore=shutil.ignore_patterns("build*", ".git", ".venv"))


def configure(tree):
    wheels = ROOT / ".venv"
    if wheels.is_dir() and not (tree / ".venv").exists():
        os.symlink(wheels, tree / ".venv")  # where CMake finds headers on a machine without a toolkit
    command = ["cmake", "-S", str(tree), "-B", str(tree / "build"), "-DCMAKE_BUILD_TYPE=None", "-DCMAKE_C_FLAGS=-O1"]
    result = subprocess.run(command, capture_output=True, text=True)
    if result.returncode:
        sys.exit("planted: cmake failed\n" + result.stdout + result.stderr)


def build(tree, tests):
    command = ["cmake", "--build", str(tree / "build"), "-j", str(os.cpu_count() or 2), "--target", *tests]
    return subprocess.run(command, capture_output=True, text=True)


def run(tree, test):
    """The exit code, or None for a test that did not end."""
    try:
        result = subprocess.run([str(tree / "build/tests" / test)], capture_output=True, timeout=TEST_SECONDS)
        return result.returncode
    except subprocess.TimeoutExpired:
        return None


def check_clean(tree, tests):
    result = build(tree, tests)
    if result.returncode:
        sys.exit("planted: the tree as it is does not build\n" + result.stdout[-4000:] + result.stderr[-4000:])
    bad = [test for test in tests if run(tree, test) != 0]
    if bad:
        sys.exit("planted: without any defect, these do not pass: " + " ".join(bad))


def plant(tree, defect):
    """One word on the outcome, and whether the suite did its job."""
    path = tree / defect.file
    text = path.read_text()
    if text.count(defect.find) != 1:
        return f"the text to replace is there {text.count(defect.find)} times: bring defects.txt up to date", False
    path.write_text(text.replace(defect.find, defect.replace))
    try:
        result = build(tree, defect.tests)
        if result.returncode:
            errors = [line for line in (result.stdout + result.stderr).splitlines() if "error" in line]
            return "does not compile: " + (errors or ["?"])[0], False
        codes = {test: run(tree, test) for test in defect.tests}
    finally:
        path.write_text(text)
    missed = [test for test, code in codes.items() if code in (0, SKIPPED)]
    if missed:
        return "MISSED by " + " ".join(missed), False
    hung = [test for test, code in codes.items() if code is None]
    return "caught" + (f" ({' '.join(hung)} did not end)" if hung else ""), True


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*", help="only these defects")
    parser.add_argument("--keep", action="store_true", help="keep the copy of the tree and print its path")
    options = parser.parse_args()
    defects = [defect for defect in read_defects() if not options.names or defect.name in options.names]
    if not defects:
        sys.exit("planted: no such defect")
    tree = pathlib.Path(tempfile.mkdtemp(prefix="moeflow-planted-"))
    begin = time.monotonic()
    caught = 0
    try:
        copy_tree(tree)
        configure(tree)
        check_clean(tree, sorted({test for defect in defects for test in defect.tests}))
        print(f"without defects all pass ({time.monotonic() - begin:.0f} s)", flush=True)
        for defect in defects:
            start = time.monotonic()
            outcome, right = plant(tree, defect)
            caught += right
            print(f"{defect.name:28} {defect.file:30} {outcome}: {' '.join(defect.tests)} "
                  f"({time.monotonic() - start:.0f} s)", flush=True)
    finally:
        if options.keep:
            print(tree)
        else:
            shutil.rmtree(tree, ignore_errors=True)
    print(f"{caught} of {len(defects)} planted defects caught, {time.monotonic() - begin:.0f} s")
    return 0 if caught == len(defects) else 1


if __name__ == "__main__":
    sys.exit(main())
