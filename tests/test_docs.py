"""The pages in docs/ are true: every name exists, everything is explained, and the example works."""

import inspect
import re
import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch

from ptq.methods import METHODS
from ptq.models.families import FAMILIES
from ptq.models.family import ExpertNames, Family, Mixer
from ptq.weights import formats
from ptq.weights.formats import Choice, Codebook, Format, IntegerInput, RowScaledCodebook, ScaledCodebook
from ptq.weights.rounding import nearest

ROOT = Path(__file__).resolve().parent.parent
GUIDES = ("add-a-family", "add-a-codebook", "add-a-kernel")
PAGES = ("README", "families", "architecture", "format", "math", "results", "perplexity", "processors", *GUIDES)


def file(name: str) -> Path:
    return ROOT / f"{name}.md" if name == "README" else ROOT / "docs" / f"{name}.md"


def page(name: str) -> str:
    return file(name).read_text()


# --- every method is called as the page says --------------------------------------------------------------------------


def test_methods_of_a_codebook_and_a_format_have_these_arguments():
    protocols = (Codebook, ScaledCodebook, RowScaledCodebook, Format, Choice, IntegerInput)
    found = re.findall(r"`(\w+)\(([\w, *=.]*)\)`", page("add-a-codebook").partition("## An example")[0])
    checked = 0
    for name, arguments in found:
        for protocol in protocols:
            if name in vars(protocol):
                expected = [each for each in inspect.signature(getattr(protocol, name)).parameters if each != "self"]
                named = [each.strip().removesuffix("=...") for each in arguments.split(",") if each.strip(" *")]
                assert named == expected or named == [e for e in expected if e != "name"], f"{name}({arguments})"
                checked += 1
    assert checked >= 13


# --- every name on every page exists ----------------------------------------------------------------------------------


@pytest.mark.parametrize("name", PAGES)
def test_paths_and_names_exist(name: str):
    text = page(name)
    for path, member in re.findall(r"`(?:\./)?([\w./-]+\.(?:py|md|json|cpp|h|txt|toml|sh))(?:::(\w+))?`", text):
        if "/" not in path:
            continue
        assert (ROOT / path).is_file(), f"{name}.md: {path}"
        assert not member or re.search(rf"\b{member}\b", (ROOT / path).read_text()), f"{name}.md: {path}::{member}"
    for path in re.findall(r"(?<![\w/.-])((?:scripts|tests)/[\w/-]+\.(?:py|sh))", text):
        assert (ROOT / path).is_file(), f"{name}.md: {path}"
    for link, part in re.findall(r"\]\((?!https://)([^)#]*)#?([^)]*)\)", text):
        target = file(name).parent / link if link else file(name)
        assert target.is_file(), f"{name}.md: {link}"
        assert not part or part in headings(target.read_text()), f"{name}.md: {link}#{part}"


def headings(text: str) -> set[str]:
    """As links name them."""
    found = re.findall(r"^#+ (.*)", text, re.MULTILINE)
    return {re.sub(r"[^\w -]", "", heading).lower().replace(" ", "-") for heading in found}


@pytest.mark.parametrize("name", PAGES)
def test_dotted_names_exist(name: str):
    for dotted in re.findall(r"`((?:ptq|quarot|quip_sharp|fp6)(?:\.\w+)+)", page(name).replace("ptq.json", "")):
        path, members = ROOT, dotted.split(".")
        while members and (path / members[0]).is_dir():
            path /= members.pop(0)
        is_file = members and (path / f"{members[0]}.py").is_file()
        path /= f"{members.pop(0)}.py" if is_file else "__init__.py"
        assert not members or re.search(rf"\b{members[0]}\b", path.read_text()), f"{name}.md: {dotted}"


def test_every_module_has_a_room():
    named = set()
    for table in page("architecture").partition("\n## 2.")[2].partition("\n## ")[0].split("\n\n"):
        rows = [row.split("|")[1] for row in table.splitlines() if row.startswith("| ")]
        here = re.findall(r"`([\w/]+)/`", rows[0]) if rows else []
        for room in rows[1:]:
            folders, alone = [*here, *re.findall(r"`(\w+)/`", room)], re.findall(r"`(\w+\.py)`", room)
            found = [f"{folder}/{path}" for folder in folders for path in alone if (ROOT / folder / path).is_file()]
            assert {path.rpartition("/")[2] for path in found} == {*alone}, room
            named |= {*re.findall(r"`(\w+/\w+\.py)`", room), *found}
    sources = (path for folder in ("ptq", *METHODS) for path in (ROOT / folder).rglob("[!_]*.py"))
    modules = {str(path.relative_to(ROOT)) for path in sources}
    assert len(modules) > 120 and not sorted(modules - named)


# --- everything is explained -----------------------------------------------------------------------------------------


def test_every_field_of_a_family_is_explained():
    for field in (*Family.__dataclass_fields__, *Mixer.__dataclass_fields__, *ExpertNames.__dataclass_fields__):
        assert f"`{field}`" in page("add-a-family"), field


def test_every_family_is_named():
    assert sorted(name for name in FAMILIES if f"`{name}`" not in page("families")) == []


def test_every_format_and_protocol_member_is_explained():
    members = {name for kind in (Codebook, Format) for name in (*vars(kind), *kind.__annotations__) if name[0] != "_"}
    assert {"dim", "fit", "version", "prepack"} <= members
    for name in members:
        assert f"`{name}" in page("add-a-codebook"), name
    for name in formats.FORMATS:
        format = formats.get(name)
        assert f"`{name}`, version {format.version}" in page("format")
        for word in (*format.options(), *format.buffers(8, 8)):
            assert f"`{word}`" in page("format"), f"{name}: {word}"


def test_the_example_codebook_works(monkeypatch: pytest.MonkeyPatch):
    """The code on docs/add-a-codebook.md, as a format of the table."""
    source = re.search(r"```python\n(.*?)```", page("add-a-codebook"), re.DOTALL)
    assert source is not None
    module = ModuleType("example")
    monkeypatch.setitem(sys.modules, "example", module)
    exec(source[1], module.__dict__)
    monkeypatch.setitem(formats.FORMATS, "example/squares", ("example", "SquaresFormat"))
    format = formats.get("example/squares")
    codebook = format.codebook
    assert isinstance(format, Format) and isinstance(codebook, Codebook) and not formats.get("dense").codebook
    w = torch.randn(6, 24, generator=torch.Generator().manual_seed(0))
    rounded = nearest(w, codebook)
    points = codebook.decode(torch.arange(16).repeat(6, 1).byte(), rounded.scales)
    brute = (points[:, :, None] - w[:, None, :]).abs().argmin(1)
    chosen = codebook.decode(rounded.codes, rounded.scales)
    torch.testing.assert_close((chosen - w).abs(), (points.gather(1, brute) - w).abs())
    parts = format.pack(rounded)
    assert {part: (tuple(t.shape), t.dtype) for part, t in parts.items()} == format.buffers(6, 24)
    codes, scales = format.unpack(parts, 6, 24)
    assert torch.equal(codes, rounded.codes) and torch.equal(scales["scale"], rounded.scales["scale"])
    torch.testing.assert_close(format.linear(torch.eye(24), parts), format.dequantize(parts, 6, 24).T)
