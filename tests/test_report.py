"""The report of a run: true numbers, one self-contained page, the same bytes for the same run."""

import json
import math
import os
import re
import xml.etree.ElementTree
from dataclasses import asdict, replace
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import quantize
from tiny_models import save_model, tiny_config

import ptq
from fp6.plan import Fp6Recipe
from ptq.errors import InputError
from ptq.files.checkpoint import Checkpoint
from ptq.models.families import FAMILIES
from ptq.models.model_shape import shape_of
from ptq.pipeline.pipeline import plan
from ptq.planning.outline import outline
from ptq.reporting import charts, report, report_page, report_schema
from ptq.reporting.contents import summary
from ptq.reporting.report_schema import Report
from ptq.statistics import outliers
from quarot.plan import QuarotRecipe
from quip_sharp.plan import QuipSharpRecipe

pytestmark = pytest.mark.usefixtures("fast")

RECIPE = QuarotRecipe(rounding="nearest", group_size=8, skip=("model.layers.1.mlp.up_proj",))
TAGS = {
    "html", "head", "meta", "title", "style", "body", "h1", "h2", "p", "div", "b", "span", "code", "svg", "path",
    "text", "circle", "rect", "table", "thead", "tbody", "tr", "th", "td",
}  # fmt: skip


@pytest.fixture(scope="module")
def packed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished checkpoint beside its `model`. Do not write to it."""
    folder = tmp_path_factory.mktemp("report")
    ptq.quantize(save_model(folder / "model"), folder / "out", RECIPE, ptq.RunOptions(progress=False))
    return folder / "out"


def build(packed: Path, **changes: Any) -> Report:
    """The report of a run, with observed inputs that were drawn by chance."""
    model = packed.with_name("model")
    target = plan(str(model), RECIPE)
    record = json.loads((packed / "ptq.json").read_text())
    generator = torch.Generator().manual_seed(0)
    names = [name for index in (0, 1) for name in outliers.observed(target.plan, index)]
    widths = {name: linear.k for name in names if (linear := target.plan.linear(name))}
    inputs = [
        {name: outliers.measure(torch.randn(9, widths[name], generator=generator) ** power) for name in names}
        for power in (5, 1)
    ]
    log = [{"name": name, "seconds": 1.5, **line} for name, line in record["linears"].items()]
    given: dict[str, Any] = dict(
        model=str(model), plan=target.plan, family=target.family, record=record, result=record["result"],
        source=target.checkpoint.tensors, written=Checkpoint.open(packed).tensors, log=log,
        before=inputs[0], after=inputs[1], positions=torch.rand(3, 2, 100, generator=generator).double(),
        text="random tokens",
    )  # fmt: skip
    return report.build(**{**given, **changes})


class Reader(HTMLParser):
    """Collects tags, attributes and text; checks that every tag is closed where it must be."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.attributes: list[tuple[str, str | None]] = []
        self.open: list[str] = []
        self.text: list[str] = []
        self.feed(page)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.attributes += attrs
        if tag != "meta":
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.attributes += attrs

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text.append(data)


# --- numbers ----------------------------------------------------------------------------------------------------------


def test_every_kind_of_bytes_has_a_colour(tmp_path: Path) -> None:
    """Also where codes are several planes, and linears have sign vectors."""
    model = save_model(tmp_path / "model")
    ptq.quantize(model, tmp_path / "out", QuipSharpRecipe(rounding="nearest", bits=4), ptq.RunOptions(progress=False))
    parts = {share["part"] for share in json.loads((tmp_path / "out" / "report.json").read_bytes())["shares"]}
    assert {"codes", "scale", "sign vectors"} <= parts <= report_page.PARTS.keys()


def test_the_numbers_are_those_of_the_checkpoint(packed: Path) -> None:
    found, contents = build(packed), summary(Checkpoint.open(packed))
    assert found.bytes_after == contents.nbytes == sum(share.after for share in found.shares)
    assert found.bytes_before == sum(share.before for share in found.shares)
    assert found.bytes_before == Checkpoint.open(packed.with_name("model")).nbytes
    rounded = [layer for layer in found.layers if "integer" in layer.storage]
    assert found.quantised_weights == sum(layer.n * layer.k for layer in rounded)
    bits = sum(layer.nbytes for layer in rounded) * 8 / found.quantised_weights
    assert found.bits_per_weight == pytest.approx(contents.bits_per_weight) == pytest.approx(bits, rel=1e-5)
    shares = {share.part: share for share in found.shares}
    assert set(shares) == {"weights", "codes", "scale", "embedding", "sign vectors", "norms", "biases"}
    embedding = next(layer for layer in found.layers if layer.name == "model.embed_tokens")
    assert embedding.nbytes == shares["embedding"].after == shares["embedding"].before
    assert shares["sign vectors"].after == 2 * 2 * 72  # R1 runs at both ends: the head stays tied
    layers = {layer.name: layer for layer in found.layers}
    down, skipped = layers["model.layers.1.mlp.down_proj"], layers["model.layers.1.mlp.up_proj"]
    assert (down.block, down.n, down.k, down.activation_bits) == (1, 72, 152, None)
    assert down.rotation == "in: R4.1 H152, out: R1 H72, online: H152"
    assert down.error is not None and 0 < down.error < 0.1 and down.loss is None
    assert (skipped.error, skipped.storage) == (None, "float32")
    assert found.model == "model" and found.recipe["group_size"] == 8


def test_tensors_that_no_model_reads_do_not_count(packed: Path) -> None:
    target = plan(str(packed.with_name("model")), RECIPE)
    tensors = target.checkpoint.tensors
    more = {**tensors, "lm_head.weight": tensors["model.embed_tokens.weight"]}
    found = build(packed, source=more, plan=replace(target.plan, unused=("lm_head.weight",)))
    assert found == build(packed)


def test_inputs_and_positions(packed: Path) -> None:
    raw = torch.rand(3, 2, 5, generator=torch.Generator().manual_seed(3)).double()
    found = build(packed, positions=raw)
    assert found.positions is not None and found.positions.rows == 2
    for curve, tensor in zip(
        (found.positions.loss_original, found.positions.loss_packed, found.positions.kl), raw, strict=True
    ):
        assert curve == pytest.approx(tensor.mean(0).tolist(), rel=1e-5)
    assert [(observed.block, observed.kind) for observed in found.inputs[:4]] == [
        (0, f"{part}_proj") for part in ("self_attn.q", "self_attn.o", "mlp.gate", "mlp.down")
    ]
    drawn = [observed.linear for observed in found.inputs if observed.before.curve is not None]
    assert drawn == [f"model.layers.{block}.{part}_proj" for block in (0, 1) for part in ("self_attn.q", "mlp.down")]
    spread = found.inputs[3].before
    assert spread.curve is not None and len(spread.curve) == found.inputs[3].channels == 152
    top = max(value for value in spread.curve if value is not None)
    median = torch.tensor(spread.curve).median().item()
    assert spread.peak_to_median == pytest.approx(top / median, rel=1e-4)
    assert all(o.before.kurtosis > o.after.kurtosis for o in found.inputs if o.before.kurtosis and o.after.kurtosis)


def test_long_curves_keep_their_peaks(monkeypatch: pytest.MonkeyPatch, packed: Path) -> None:
    monkeypatch.setattr(report, "CURVE_POINTS", 7)
    whole = build(packed).inputs[3].before.curve
    assert whole is not None and len(whole) == 7
    monkeypatch.undo()
    exact = build(packed).inputs[3].before.curve
    assert exact is not None
    runs = torch.tensor_split(torch.tensor(exact), 7)
    assert whole == pytest.approx([run.max().item() for run in runs])


def test_every_number_is_finite_and_is_read_again(packed: Path, tmp_path: Path) -> None:
    log = [{"name": "model.layers.0.mlp.up_proj", "error": math.nan, "loss": math.inf}]
    positions = torch.full((3, 1, 4), math.nan).double()
    for found in (build(packed), build(packed, log=log, positions=positions)):
        report.write(found, tmp_path)

        def refuse(constant: str) -> None:
            raise AssertionError(constant)

        content = json.loads((tmp_path / "report.json").read_text(), parse_constant=refuse)
        assert content["version"] == report_schema.VERSION
        assert report_schema.read(tmp_path / "report.json") == found
    layer = next(layer for layer in content["layers"] if layer["name"].endswith("0.mlp.up_proj"))
    assert layer["error"] is None and content["positions"]["kl"] == [None] * 4
    assert "nan" not in " ".join(Reader((tmp_path / "report.html").read_text()).text).split()


def test_a_report_that_is_none(packed: Path, tmp_path: Path) -> None:
    path = tmp_path / "report.json"
    content = asdict(build(packed))
    for damaged in ("", "[]", "{}", json.dumps({**content, "version": 99}), json.dumps({**content, "more": 1})):
        path.write_text(damaged)
        with pytest.raises(InputError, match="report"):
            report_schema.read(path)


# --- the page ---------------------------------------------------------------------------------------------------------


def test_the_page_is_whole_and_needs_nothing_else(packed: Path) -> None:
    page = report_page.page(build(packed))
    found = Reader(page)
    assert set(found.tags) <= TAGS
    assert found.tags.count("h1") == 1 and found.tags.count("h2") == 5
    assert (
        "http:" not in page
        and "https:" not in page
        and "//" not in page
        and "url(" not in page
        and "@import" not in page
    )
    assert not [name for name, _ in found.attributes if name in ("src", "href") or name.startswith("on")]
    assert ("content", "default-src 'none'; style-src 'unsafe-inline'") in found.attributes
    pictures = re.findall(r'<svg[^>]* role="img".*?</svg>', page, re.DOTALL)
    assert len(pictures) == 5
    for picture in pictures:
        xml.etree.ElementTree.fromstring(picture)
        assert "nan" not in picture and "inf" not in picture
    text = " ".join(found.text)
    for expected in ("max/median", "model.layers.1.mlp.down_proj", "group_size 8", "random tokens", "codes", "KL"):
        assert expected in text


def test_outliers_of_what_was_not_rotated(tiny: Path, tmp_path: Path) -> None:
    ptq.quantize(tiny, tmp_path / "out", Fp6Recipe(), ptq.RunOptions(progress=False))
    page = (tmp_path / "out" / "report.html").read_text()
    assert "Outliers</h2>" in page and "before and after rotation" not in page
    assert "Nothing was rotated here" in page and "Measured on a few random tokens" in page


def test_hostile_names_stay_text(packed: Path) -> None:
    evil = "</style></text></svg><script>alert(\"1\")</script><img src=x onerror='alert(2)'>&amp;"
    good = build(packed)
    assert good.positions is not None
    found = replace(
        good, model=evil, family=evil, made_with=evil, notes=tuple(evil for _ in good.notes),
        recipe={evil + key: [evil] for key, value in good.recipe.items() if value not in (None, [])},
        layers=tuple(replace(layer, name=evil + layer.name, storage=evil, rotation=evil) for layer in good.layers),
        inputs=tuple(replace(o, linear=evil, kind=evil + o.kind) for o in good.inputs),
        shares=tuple(replace(share, part=evil + share.part) for share in good.shares),
        positions=replace(good.positions, text=evil),
    )  # fmt: skip
    page = report_page.page(found)
    read = Reader(page)
    assert set(read.tags) <= TAGS and read.tags == Reader(report_page.page(good)).tags
    assert not [name for name, _ in read.attributes if name in ("src", "href") or name.startswith("on")]
    assert "".join(read.text).count(evil) > 30
    for picture in re.findall(r'<svg[^>]* role="img".*?</svg>', page, re.DOTALL):
        xml.etree.ElementTree.fromstring(picture)


def test_a_file_name_that_is_no_unicode(packed: Path, tmp_path: Path) -> None:
    report.write(replace(build(packed), model=os.fsdecode(b"m\xff")), tmp_path)
    assert "<h1>m?</h1>" in (tmp_path / "report.html").read_text()


def test_the_same_run_gives_the_same_bytes(packed: Path, tmp_path: Path) -> None:
    """Also where the steps took other times."""
    for name, seconds in (("a", 1.0), ("b", 7.25)):
        (tmp_path / name).mkdir()
        log = json.loads((packed / "ptq.json").read_text())["linears"]
        lines = [{"name": linear, "seconds": seconds, **line} for linear, line in log.items()]
        report.write(build(packed, log=lines), tmp_path / name)
    for file in ("report.json", "report.html"):
        assert (tmp_path / "a" / file).read_bytes() == (tmp_path / "b" / file).read_bytes()


def test_the_page_of_little(packed: Path) -> None:
    """Nothing observed, nothing rounded, one position, no rows."""
    found = build(packed, before={}, after={}, positions=None, log=[])
    assert Reader(report_page.page(found)).tags.count("h2") == 2
    one = build(packed, positions=torch.zeros(3, 1, 1).double())
    assert Reader(report_page.page(one)).tags.count("h2") == 5
    assert build(packed, positions=torch.zeros(3, 0, 4).double()).positions is None
    bare = replace(found, bits_per_weight=None, kl=None, top1=None, rotation_error=None, layers=(), shares=())
    assert "n/a" in report_page.page(bare)


def test_the_picture_alone_is_a_file_of_its_own(packed: Path) -> None:
    picture = report_page.channels_picture(build(packed), standalone=True)
    root = xml.etree.ElementTree.fromstring(picture)
    assert root.tag == "{http://www.w3.org/2000/svg}svg" and len(list(root)) > 20


# --- charts -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("log", [False, True])
@pytest.mark.parametrize("values", [[1.0], [0.0, 0.0], [1e-9, 1e9], [3.0, 3.001], [None], [], [5.0, 5e4], [-2.0, 7.0]])
def test_axes_of_any_values(values: list[float | None], log: bool) -> None:
    axis = replace(charts.axis(values, log=log), start=100.0, end=200.0)
    ticks = axis.ticks()
    assert 1 <= len(ticks) <= 13 and ticks == sorted(set(ticks))
    assert all(99.9 <= axis.at(tick) <= 200.1 for tick in ticks)
    shown = [value for value in values if value is not None and (value > 0 or not log)]
    assert all(100 <= axis.at(value) <= 200 for value in shown)
    assert axis.at(axis.low) == pytest.approx(100) and axis.at(axis.high) == pytest.approx(200)


def test_numbers_of_ticks() -> None:
    expected = {0: "0", 0.05: "0.05", 1.0: "1", 1500: "1500", 2e6: "2e6", 1.5e-7: "1.5e-7", 0.3: "0.3"}
    assert {value: charts.number(value) for value in expected} == expected


# --- where it shows ---------------------------------------------------------------------------------------------------


def test_inspect_names_the_report(packed: Path, tmp_path: Path) -> None:
    assert json.loads(quantize("inspect", packed.with_name("model"), "--json").stdout)["report"] is None
    (tmp_path / "out").mkdir()
    for path in packed.iterdir():
        (tmp_path / "out" / path.name).write_bytes(path.read_bytes())
    report.write(build(packed), tmp_path / "out")
    page = str(tmp_path / "out" / "report.html")
    assert f"report: {page}" in quantize("inspect", tmp_path / "out").stdout.splitlines()
    assert json.loads(quantize("inspect", tmp_path / "out", "--json").stdout)["report"] == page
    assert quantize("verify", tmp_path / "out").exit_code == 0


def test_every_family_is_in_one_table() -> None:
    """`observed` names the same four parts for each of them, two where a block does but half."""
    for family in FAMILIES.values():
        shape = shape_of(tiny_config(family.model_type))
        made, parts = outline("", shape, family, {}), 2 if shape.halves else 4
        assert [len(outliers.observed(made, index)) for index in range(2)] == [parts, parts]


def test_an_axis_of_rounding_noise_below_zero() -> None:
    """The KL divergence of a model that is only rotated can end a hair below zero."""
    assert charts.axis([-2e-8, -1e-9], zero=True).ticks()[0] == 0.0
