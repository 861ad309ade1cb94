"""What README.md shows is true: its Python runs as pasted, its table is the registry's."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

from hf_posenc import available_schemes
from hf_posenc.registry import supported_model_types

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"^```python\n(.*?)^```$", README, flags=re.DOTALL | re.MULTILINE)


def test_there_is_python_to_run():
    assert BLOCKS


@pytest.mark.parametrize("block", BLOCKS, ids=[f"block {i}" for i in range(len(BLOCKS))])
def test_python_runs_as_pasted(block, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    exec(compile(block, "README.md", "exec"), {"__name__": "__main__"})


def run_table_script(root, *arguments):
    script = root / "scripts/make_scheme_table.py"
    environment = {"PYTHONPATH": str(ROOT), "PATH": "", "HF_HUB_OFFLINE": "1"}
    return subprocess.run(
        [sys.executable, str(script), *arguments], capture_output=True, text=True, env=environment, check=False
    )


def test_table_of_schemes_is_current():
    result = run_table_script(ROOT, "--check")
    assert result.returncode == 0, result.stdout + result.stderr


def test_table_script_repairs_what_it_reports(tmp_path):
    (tmp_path / "scripts").mkdir()
    (tmp_path / "scripts/make_scheme_table.py").write_text((ROOT / "scripts/make_scheme_table.py").read_text())
    stale = README.replace("| `alibi` |", "| `alibye` |")
    assert stale != README
    (tmp_path / "README.md").write_text(stale, encoding="utf-8")

    assert run_table_script(tmp_path, "--check").returncode == 1
    assert run_table_script(tmp_path).returncode == 0
    assert (tmp_path / "README.md").read_text(encoding="utf-8") == README


def test_every_scheme_and_family_is_named():
    for name in (*available_schemes(), *supported_model_types()):
        assert f"`{name}`" in README, name


def test_commands_and_links_lead_to_files():
    paths = {*re.findall(r"\]\((?!http)([^)#]+)\)", README), *re.findall(r"bash (\S+\.sh)", README)}
    assert paths
    missing = sorted(path for path in paths if not (ROOT / path).exists())
    assert missing == []
