"""The ctypes structs against moeflow.h itself, as the C compiler lays it out. Needs cc; neither numpy nor the library."""
from __future__ import annotations

import shutil
import subprocess
import sys
import tempfile
import unittest
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from moeflow import library  # noqa: E402

HEADER = Path(__file__).resolve().parents[3] / "runtime" / "moeflow.h"
STRUCTS = {"moeflow_open_config": library.OpenConfig, "moeflow_group_config": library.GroupConfig,
           "moeflow_layer_config": library.LayerConfig, "moeflow_weights": library.Weights,
           "moeflow_forward_args": library.ForwardArgs}


def program() -> str:
    lines = ["#include <moeflow.h>", "#include <stddef.h>", "#include <stdio.h>", "int main(void) {"]
    for name, struct in STRUCTS.items():
        lines.append(f'printf("{name} - %zu\\n", sizeof({name}));')
        lines += [f'printf("{name} {field[0]} %zu\\n", offsetof({name}, {field[0]}));' for field in struct._fields_]
    return "\n".join([*lines, "}"])


class StructTest(unittest.TestCase):
    def test_layouts_match_the_header(self):
        compiler = shutil.which("cc") or shutil.which("gcc")
        if not compiler or not HEADER.exists():
            self.skipTest("no C compiler, or no moeflow.h")
        with tempfile.TemporaryDirectory() as folder:
            Path(folder, "layout.c").write_text(program())
            subprocess.run([compiler, f"-I{HEADER.parent}", "-o", f"{folder}/layout", f"{folder}/layout.c"], check=True)
            printed = subprocess.run([f"{folder}/layout"], capture_output=True, text=True, check=True).stdout
        for line in printed.splitlines():
            name, field, number = line.split()
            struct = STRUCTS[name]
            mine = library.ctypes.sizeof(struct) if field == "-" else getattr(struct, field).offset
            self.assertEqual(mine, int(number), f"{name}.{field}")

    def test_every_function_of_the_header_is_declared(self):
        text = HEADER.read_text()
        declared = {word.split("(")[0].split()[-1].lstrip("*") for word in text.split("MOEFLOW_API ")[1:] if "(" in word.split(";")[0]}
        self.assertEqual({name for name in declared if name.startswith("moeflow_")}, set(library.FUNCTIONS))


if __name__ == "__main__":
    unittest.main()
