"""Importing the package imports nothing heavy, and whatever is imported first, patched checkpoints load."""

import ast
import os
import subprocess
import sys
from pathlib import Path

import pytest
from families import tiny

import hf_posenc
from hf_posenc import patch_model

ROOT = Path(__file__).parents[2]


def python(code, *arguments):
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-W", "error::ImportWarning", "-c", code, *map(str, arguments)]
    ran = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stderr
    return ran.stdout


def test_the_package_and_the_commands_help_do_without_torch():
    code = """
import sys, hf_posenc
from hf_posenc import cli
assert "describe" in dir(hf_posenc) and hf_posenc.__version__
try:
    cli.main(["--help"])
except SystemExit as stop:
    assert stop.code == 0
assert not {"torch", "transformers", "peft", "accelerate"} & set(sys.modules), sorted(sys.modules)
"""
    assert "schemes" in python(code)


def test_type_checkers_read_the_names_that_there_are():
    stub = ast.parse((ROOT / "hf_posenc/__init__.pyi").read_text(encoding="utf-8"))
    imports = [node for node in stub.body if isinstance(node, ast.ImportFrom)]
    named = {alias.asname: f".{node.module}" for node in imports for alias in node.names if alias.name == alias.asname}
    assert named | {"__version__": ".core.version"} == hf_posenc._MODULE_OF
    assert all(hasattr(hf_posenc, name) for name in hf_posenc.__all__)


FIRST = [
    "from transformers import AutoModelForCausalLM",
    "import hf_posenc.checkpoints.model_classes",
    "import transformers.models.auto.modeling_auto",
    "from transformers import AutoConfig",
    "from transformers import Trainer",
    "import peft",
    "import hf_posenc.classes",
    "from hf_posenc.core.registry import family_for; family_for('llama')",
]


@pytest.mark.rows(default=0, slow=8)
@pytest.mark.parametrize("first", [FIRST[0], *(pytest.param(first, marks=pytest.mark.slow) for first in FIRST[1:])])
@pytest.mark.parametrize(
    "before", [True, pytest.param(False, marks=pytest.mark.slow)], ids=["package-first", "it-first"]
)
def test_checkpoints_load_whatever_is_imported_first(first, before, tmp_path):
    patch_model(tiny("llama"), "alibi").save_pretrained(tmp_path)
    package = "import hf_posenc"
    code = f"""
import sys
{package if before else first}
{first if before else package}
from transformers import AutoModelForCausalLM
model = AutoModelForCausalLM.from_pretrained(sys.argv[1])
assert hf_posenc.is_patched(model), type(model)
print(type(model).__name__)
"""
    assert python(code, tmp_path) == "PosEncLlamaForCausalLM\n"
