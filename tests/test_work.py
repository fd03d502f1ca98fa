"""The work folder and its record."""

import dataclasses
import json
from pathlib import Path

import pytest
import torch

import ptq
from ptq.models.families import FAMILIES
from ptq.models.model_shape import ModelShape
from ptq.pipeline.work import (
    UNFINISHED,
    Record,
    _from_hex,
    _to_hex,
    differences,
    open_work,
    read_record,
    remove_finished_work,
    remove_work,
)
from quarot.plan import QuarotRecipe, plan

SHAPE = ModelShape(
    hidden=24, intermediate=40, vocab=9, blocks=1, heads=2, kv_heads=1, head_dim=12, rotary=12, tied=False
)
RECIPE = QuarotRecipe(skip=("*.o_proj",))
PLAN = plan(SHAPE, FAMILIES["llama"], RECIPE, {})
RECORD = Record.of(RECIPE, PLAN, "source", "calibration")


def test_signs_are_stored_as_bits() -> None:
    """Golden: bit i of byte i // 8, lowest first, is 1 for -1."""
    assert _to_hex(torch.tensor([-1, 1, 1, 1, 1, 1, 1, 1, 1, -1], dtype=torch.int8)) == "0102"
    for length in (1, 7, 8, 9, 64, 100):
        drawn = (
            torch.randint(0, 2, (length,), generator=torch.Generator().manual_seed(length), dtype=torch.int8) * 2 - 1
        )
        assert torch.equal(_from_hex(_to_hex(drawn), length), drawn)


def test_the_signs_of_a_record_are_those_that_were_drawn() -> None:
    vectors = RECORD.sign_vectors(PLAN)
    assert {name: len(vector) for name, vector in vectors.items()} == PLAN.signs
    assert all(vector.abs().eq(1).all() for vector in vectors.values())
    stored = Record(**{**vars(RECORD), "signs": {**RECORD.signs, "R1": "ffffff"}})
    assert torch.equal(stored.sign_vectors(PLAN)["R1"], -torch.ones(24, dtype=torch.int8)), "stored, not drawn again"


def test_a_record_survives_json() -> None:
    assert differences(RECORD.as_dict(), json.loads(json.dumps(RECORD.as_dict()))) == []


def test_every_part_of_a_record_is_in_the_fingerprint() -> None:
    for field in dataclasses.fields(Record):
        other = {"a": "other"} if field.name in ("recipe", "signs") else "other"
        changed = dataclasses.replace(RECORD, **{field.name: other})
        assert changed.as_dict()["fingerprint"] != RECORD.as_dict()["fingerprint"], field.name


@pytest.mark.parametrize(
    ("change", "difference"),
    [
        (dict(recipe={**RECORD.recipe, "seed": 7}), ["seed: 7 -> 0"]),
        (dict(recipe={**RECORD.recipe, "gone": 1}), ["gone: 1 -> None"]),
        (dict(source="other"), ["the model has changed"]),
        (dict(calibration=None), ["the calibration data has changed"]),
        (dict(version="0"), [f"0 -> {RECORD.version}"]),
        (dict(signs={}), ["its record has been edited"]),
    ],
)
def test_differences_are_named(change: dict[str, object], difference: list[str]) -> None:
    assert differences(RECORD.as_dict(), dataclasses.replace(RECORD, **change).as_dict()) == difference  # type: ignore[arg-type]


def test_a_work_folder_is_made_and_continued(tmp_path: Path) -> None:
    folder = tmp_path / "deep" / "work"
    open_work(folder, RECORD, restart=False, partial=tmp_path / "none")
    (folder / "linears").mkdir()
    (folder / "linears" / "a.safetensors").write_text("done")
    (folder / "linears" / "b.safetensors.1234.tmp").write_text("half")
    open_work(folder, RECORD, restart=False, partial=tmp_path / "none")
    assert [path.name for path in (folder / "linears").iterdir()] == ["a.safetensors"]
    open_work(folder, RECORD, restart=True, partial=tmp_path / "none")
    assert [path.name for path in folder.iterdir()] == [UNFINISHED]


def test_a_record_that_was_half_written_is_no_obstacle(tmp_path: Path) -> None:
    (tmp_path / f"{UNFINISHED}.12345678.tmp").write_text("{")
    open_work(tmp_path, RECORD, restart=False, partial=tmp_path / "none")
    assert differences(RECORD.as_dict(), read_record(tmp_path / UNFINISHED)) == []


@pytest.mark.parametrize("restart", [False, True])
@pytest.mark.parametrize("name", ["notes.txt", "download.tmp", "ptq.json", "work"])
def test_a_folder_of_somebody_else_is_left_alone(name: str, restart: bool, tmp_path: Path) -> None:
    (tmp_path / name).write_text("mine")
    folder = tmp_path / name if name == "work" else tmp_path
    with pytest.raises(ptq.InputError, match="not unfinished work of ptq"):
        open_work(folder, RECORD, restart, tmp_path / "none")
    assert [path.name for path in tmp_path.iterdir()] == [name] and (tmp_path / name).read_text() == "mine"


@pytest.mark.parametrize("content", [b"", b"{", b"[]", b'{"recipe": 1}', b"\xff\xfe"])
def test_a_damaged_record(content: bytes, tmp_path: Path) -> None:
    (tmp_path / UNFINISHED).write_bytes(content)
    (tmp_path / "linears").mkdir()
    (tmp_path / f"{UNFINISHED}.1234.tmp").write_text("half")
    with pytest.raises(ptq.InputError, match="not a record of a ptq run.*; pass --restart, or name another folder"):
        open_work(tmp_path, RECORD, restart=False, partial=tmp_path / "none")
    open_work(tmp_path, RECORD, restart=True, partial=tmp_path / "none")
    assert differences(RECORD.as_dict(), read_record(tmp_path / UNFINISHED)) == []


@pytest.mark.parametrize("content", ['{"my": "notes"}', '{"recipe": {"flour": 3}}', None])
def test_a_folder_with_more_in_it_than_work_is_left_alone(content: str | None, tmp_path: Path) -> None:
    (tmp_path / UNFINISHED).write_text(content or json.dumps(RECORD.as_dict()))
    for name in ("thesis.tex", "linears"):
        (tmp_path / name).write_text("mine")
    before = sorted(tmp_path.iterdir())
    with pytest.raises(
        ptq.InputError, match="holds thesis.tex, which is no work of ptq, and --restart would remove it"
    ):
        open_work(tmp_path, RECORD, restart=True, partial=tmp_path / "none")
    assert sorted(tmp_path.iterdir()) == before


def test_only_the_work_of_this_run_is_removed(tmp_path: Path) -> None:
    other = dataclasses.replace(RECORD, source="other")
    open_work(tmp_path / "work", other, restart=False, partial=tmp_path / "none")
    remove_finished_work(tmp_path / "work", RECORD)
    assert (tmp_path / "work" / UNFINISHED).exists()
    remove_finished_work(tmp_path / "work", other)
    remove_finished_work(tmp_path / "work", other)
    assert not (tmp_path / "work").exists()


def test_the_record_goes_last(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """So that a folder that is half removed is still known."""
    open_work(tmp_path / "work", RECORD, restart=False, partial=tmp_path / "none")
    (tmp_path / "work" / "probe").mkdir()
    left: list[list[str]] = []
    real = ptq.pipeline.work.shutil.rmtree  # type: ignore[attr-defined]
    monkeypatch.setattr(
        "shutil.rmtree",
        lambda folder: (left.append(sorted(p.name for p in (tmp_path / "work").iterdir())), real(folder)),
    )
    remove_work(tmp_path / "work")
    assert left == [["probe", UNFINISHED]] and not (tmp_path / "work").exists()


def test_a_folder_that_cannot_be_removed_is_left_empty(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Such as one where a disk is mounted."""
    open_work(tmp_path / "work", RECORD, restart=False, partial=tmp_path / "none")

    def busy(path: Path) -> None:
        raise OSError(16, "Device or resource busy", str(path))

    monkeypatch.setattr(Path, "rmdir", busy)
    remove_work(tmp_path / "work")
    assert not any((tmp_path / "work").iterdir())
