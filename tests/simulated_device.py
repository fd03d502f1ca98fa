"""A second device where there is no GPU: its tensors keep their numbers on the CPU, but say that they are elsewhere. An
op that is given tensors of both is refused, as CUDA refuses it. What is tested is which device things are on.

    python tests/simulated_device.py MODEL OUT METHOD OPTIONS     a run on that device; OPTIONS of the recipe, as JSON
"""

import re
import sys
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils import _python_dispatch, backend_registration
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

NAME = "npy"
"""The only name for which torch has a backend in Python."""
backend_registration._setup_privateuseone_for_python_backend(NAME)
DEVICE = torch.device(NAME, 0)
CUDA_OPS = {
    f"ptq::{name}"
    for source in (Path(__file__).parents[1] / "csrc").glob("*_cuda/*.cu")
    for name in re.findall(r'm\.impl\("(\w+)"', source.read_text())
}
REFERENCES: dict[str, Callable[..., Any]] = {}
"""Of the ops that have no CUDA kernel, by name."""


class MixedDevicesError(Exception):
    """An op was given tensors of both devices."""


class Elsewhere(Tensor):
    """A tensor on the simulated device."""

    inner: Tensor

    @staticmethod
    def __new__(cls, inner: Tensor) -> "Elsewhere":
        return torch.Tensor._make_wrapper_subclass(  # pyright: ignore[reportAttributeAccessIssue]
            cls, inner.shape, strides=inner.stride(), storage_offset=inner.storage_offset(), dtype=inner.dtype,
            device=DEVICE,
        )  # fmt: skip

    def __init__(self, inner: Tensor) -> None:
        self.inner = inner

    def tolist(self) -> Any:
        return self.inner.tolist()

    def numpy(self, *args: Any, **kwargs: Any) -> Any:
        raise MixedDevicesError("numpy() of a tensor on the device")

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return _run(func, args, kwargs or {})


class Simulated(TorchDispatchMode):
    """Within it, tensors can be made on the simulated device, and moved there and back."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return _run(func, args, kwargs or {})


def _run(func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    name = func.name()
    tensors = [x for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor)]
    here = [x for x in tensors if isinstance(x, Elsewhere)]
    reference = REFERENCES.get(name.split(".")[0])
    if here and reference is not None and name.split(".")[0] not in CUDA_OPS:
        with Simulated():
            return reference(*args, **kwargs)
    if here and not _may_mix(name, args) and any(x.dim() and not isinstance(x, Elsewhere) for x in tensors):
        raise MixedDevicesError(f"{name}: {[(x.device.type, tuple(x.shape)) for x in tensors]}")
    target = kwargs.get("device") or next((x for x in args if isinstance(x, torch.device)), None)
    results = func(*tree_map(_inner, args), **tree_map(_inner, kwargs))
    on_device = bool(here) if target is None else target.type == NAME
    if name.startswith("aten::copy_"):
        on_device = isinstance(args[0], Elsewhere)
    known = {id(x.inner): x for x in here}

    def outer(x: Any) -> Any:
        return known.get(id(x), Elsewhere(x) if on_device else x) if isinstance(x, Tensor) else x

    return tree_map(outer, results)


def _may_mix(name: str, args: Any) -> bool:
    if name.startswith(("aten::index.Tensor", "aten::index_put", "aten::_index_put")):
        return isinstance(args[0], Elsewhere)  # indices may come from the CPU
    return name.startswith(("aten::_to_copy", "aten::copy_", "aten::to.", "aten::lift"))


def _inner(x: Any) -> Any:
    if isinstance(x, Elsewhere):
        return x.inner
    return torch.device("cpu") if isinstance(x, torch.device) and x.type == NAME else x


def set_up() -> None:
    """Once in a process, before this package is imported: references are noted as they are declared."""
    own_impl, own_tensor = torch.library.impl, torch.tensor
    _python_dispatch._disable_current_modes = nullcontext  # it is a mode that simulates

    def impl(op: Any, key: str, *args: Any, **kwargs: Any) -> Any:
        register = own_impl(op, key, *args, **kwargs)

        def noted(function: Callable[..., Any]) -> Any:
            REFERENCES[op] = function
            return register(function)

        return noted if key == "CompositeExplicitAutograd" else register

    def tensor(data: Any, *args: Any, device: Any = None, **kwargs: Any) -> Tensor:
        elsewhere = device is not None and torch.device(device).type == NAME
        return (
            own_tensor(data, *args, **kwargs).to(DEVICE)
            if elsewhere
            else own_tensor(data, *args, device=device, **kwargs)
        )

    torch.library.impl, torch.tensor = impl, tensor


def main(model: str, out: str, method: str, options: str) -> None:
    set_up()
    import json

    import ptq
    from fp6.plan import Fp6Recipe
    from ptq.ops import matmul
    from ptq.pipeline import pipeline
    from ptq.weights import layouts
    from quarot.plan import QuarotRecipe
    from quip_sharp.plan import QuipSharpRecipe

    pipeline._device = lambda name, workers: DEVICE
    layouts.LAYOUTS[NAME] = "fragments"
    matmul.lies_on_gpu = lambda x: x.device.type == NAME
    recipes = {"quarot": QuarotRecipe, "fp6": Fp6Recipe, "quip-sharp": QuipSharpRecipe}
    with Simulated():
        try:
            torch.ones(3, device=DEVICE) + torch.ones(3)
        except MixedDevicesError:
            pass
        else:
            raise AssertionError("the simulated device refuses nothing")
        ptq.quantize(model, out, recipes[method](**json.loads(options)), ptq.RunOptions(progress=False))


if __name__ == "__main__":
    main(*sys.argv[1:])
