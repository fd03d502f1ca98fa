"""The proofs that end every run: each finds what it is for, and then there is no result."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import check_refused, edit_tensors, quantize

from ptq.files.shards import Shards
from ptq.pipeline import pipeline, rewrite
from ptq.pipeline.job import Job
from ptq.pipeline.proof import ProbeAgreement, over_rows

pytestmark = pytest.mark.usefixtures("fast")
NAME = "model.layers.1.mlp.up_proj"
Break = Callable[[pytest.MonkeyPatch], None]


def final_norm(factor: float) -> Break:
    """The rotated model's last gain times a factor."""

    def apply(patch: pytest.MonkeyPatch) -> None:
        real = Job.rewritten_last
        patch.setattr(Job, "rewritten_last", lambda job: {name: factor * norm for name, norm in real(job).items()})

    return apply


def head(patch: pytest.MonkeyPatch) -> None:
    real = rewrite.weight

    def broken(linear: Any, *rest: Any) -> torch.Tensor:
        return real(linear, *rest) * (1.002 if linear.name == "lm_head" else 1)

    patch.setattr(rewrite, "weight", broken)


def packed_scale(patch: pytest.MonkeyPatch) -> None:
    real = Shards.place

    def broken(shards: Shards, tensors: dict[str, torch.Tensor]) -> None:
        if (name := f"{NAME}.weight_scale") in tensors:
            tensors[name].view(torch.bfloat16)[0] = torch.nan
        real(shards, tensors)

    patch.setattr(Shards, "place", broken)


def written(edit: Callable[[dict[str, torch.Tensor]], Any]) -> Break:
    """The shards after `Shards.finish`."""

    def apply(patch: pytest.MonkeyPatch) -> None:
        real = pipeline.complete

        def broken(job: Job, shards: Shards) -> None:
            real(job, shards)
            edit_tensors(edit)(shards.folder)

        patch.setattr(pipeline, "complete", broken)

    return apply


BROKEN: dict[str, tuple[Break, str]] = {
    "the last norm": (final_norm(1.002), "the rotated model's logits differ from the original's by 2.0e-03"),
    "a last norm that is no number": (final_norm(torch.nan), "the rotated model's logits differ from the original's"),
    "the head": (head, "the rotated model's logits differ from the original's by 2.0e-03"),
    "a scale that is no number": (packed_scale, "the packed model's logits are not finite"),
    "a code": (written(lambda content: content[f"{NAME}.weight_codes"][3, 2].bitwise_xor_(1)),
               "does not give the logits that were measured"),
    "the last bit of a norm": (written(lambda content: content["model.norm.weight"].view(torch.int32)[3].add_(1)),
                               "does not give the logits that were measured"),
    "a tensor that is lost": (written(lambda content: content.pop(f"{NAME}.weight_scale")),
                              f"lacks, or has one too many of, '{NAME}.weight_scale'"),
    "a tensor too many": (written(lambda content: content.update(more=torch.ones(1))),
                          "lacks, or has one too many of, 'more'"),
}  # fmt: skip


@pytest.mark.parametrize(("broken", "message"), BROKEN.values(), ids=BROKEN)
def test_what_is_broken_is_no_result(
    broken: Break, message: str, tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    broken(monkeypatch)
    options = ["--offline"] if broken is head else []  # else a tied one is not rewritten
    check_refused(quantize("quarot", tiny, tmp_path / "out", "--rounding", "nearest", *options), message, code=1)
    assert not (tmp_path / "out").exists()


def test_several_rows_say_how_sure_their_mean_is() -> None:
    rows = [ProbeAgreement(rotation_error=0.1 * kl, kl=kl, top1=1 - kl) for kl in (0.1, 0.2, 0.6)]
    found = over_rows(rows)
    assert (found.rotation_error, found.kl, found.top1) == pytest.approx((0.06, 0.3, 0.7))
    assert found.kl_standard_error == pytest.approx((0.14 / 2 / 3) ** 0.5)
    assert over_rows(rows[:1]).kl_standard_error is None
