"""Every python block of the README and of docs/ runs as it is written."""

import dataclasses
import re
import runpy
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PAGES = ["README.md", "docs/extend.md", "docs/design.md"]
BLOCKS = [
    pytest.param(block, id=f"{page}-{number}")
    for page in PAGES
    for number, block in enumerate(
        re.findall(r"```python\n(.*?)```", (ROOT / page).read_text(), re.DOTALL)
    )
]


@pytest.mark.parametrize("block", BLOCKS)
def test_block(block: str, monkeypatch: pytest.MonkeyPatch) -> None:
    from dinfer import registry

    known = {kind: dict(found) for kind, found in registry._registered.items()}
    monkeypatch.setattr(registry, "_registered", known)
    exec(compile(block, "block", "exec"), {"__name__": "block"})


@pytest.mark.parametrize("kind", ["decoder", "cache", "iteration"])
def test_the_table_of_algorithms_is_whole(kind: str) -> None:
    """Every strategy of the folder has its row, with every option and its default."""
    from dinfer import registry

    text = (ROOT / "docs/algorithms.md").read_text()
    sections = dict(part.split("\n", 1) for part in text.split("\n## ")[1:])
    rows = {
        row.split("|")[1].strip(" `"): dict(
            option.split("=") for option in re.findall(r"`(\w+=[^`]*)`", row.split("|")[-2])
        )
        for row in sections[f"{kind.capitalize()}s"].splitlines()
        if row.startswith("| `")
    }
    for name in registry.names(kind):
        fields = dataclasses.fields(registry.find(kind, name))
        assert rows[name] == {
            f.name: str(f.default).lower() if isinstance(f.default, bool) else str(f.default)
            for f in fields
        }


@pytest.mark.parametrize("file", sorted((ROOT / "examples").glob("*.py")), ids=lambda f: f.name)
def test_example(file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    runpy.run_path(str(file), run_name="__main__")
    assert "14" in capsys.readouterr().out or file.name == "canvas.py"
