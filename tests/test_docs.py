"""Every python block of the README and of docs/ runs as it is written."""

import re
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
