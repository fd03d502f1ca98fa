"""Fine-tuning around frozen codes (Tseng et al. 2024, arXiv:2402.04396, section 5): the training loop.

What is trained is held in float32. Every step and every measurement sees it as it will be written (sign vectors in
float16, norms in the source's dtype), so what is kept is what was measured; the gradient passes straight through that
cast. The best on held-out rows is kept, and the start counts: nothing ends worse than it began.
"""

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from ptq.errors import RunError
from ptq.files import work_files
from ptq.pipeline import rewrite
from ptq.pipeline.trainable import Trained, Values
from ptq.planning.plan import LinearPlan, Plan, weights_of

HELD_OUT = 8
"""One chunk of so many is held out."""
LEAST_GAIN = 0.005
"""An epoch that lowers the held-out loss by less than this share of it was no success."""
PATIENCE = 4
"""After an epoch without success, training goes on from the best so far at half the rate; after so many, it ends. The
rate also falls in a straight line, towards zero at the end of the last epoch."""
BETAS, EPSILON = (0.9, 0.999), 1e-8
"""Adam's decay of the two averages, and what is added to the root in its denominator."""

Tell = Callable[[str, float], None]
"""Called with what is being done, and with the share of the training that has just been done."""


@dataclass(frozen=True)
class Task:
    """What is trained, on what, and where it is kept."""

    name: str
    """Names the training in messages; with the seed, it decides the order of the batches."""
    seed: int
    trained: Mapping[str, Trained]
    gradients: Callable[[Values, int], float]
    """Leaves the gradient of batch i's loss in `.grad` of the values that it is given; returns the loss."""
    held_out: Callable[[Values], float]
    """The loss on the held-out rows."""
    batches: int
    epochs: int
    file: Path
    """File of the state after each epoch; training goes on from there."""


@dataclass
class _State:
    """Where a training stands after some epochs."""

    values: Values
    best: Values
    means: Values
    squares: Values
    losses: list[float]
    """On the held-out rows: at the start, then after every epoch."""
    steps: int = 0
    failures: int = 0


def turns(linears: Iterable[LinearPlan]) -> list[list[LinearPlan]]:
    """The linears of a block that are rounded, as they take turns: those that share an input together."""
    found: dict[str, list[LinearPlan]] = {}
    for linear in linears:
        if linear.statistics is not None:
            found.setdefault(linear.statistics, []).append(linear)
    return list(found.values())


def trained_weights(plan: Plan) -> int:
    """Weights that go through all epochs of all trainings of a plan."""
    if plan.finetune == "none":
        return 0
    inside = sum(linear.n * linear.k for linear in plan.linears if linear.statistics)
    whole = weights_of(plan.linears) * (plan.finetune == "full")
    return plan.finetune_epochs * (len(turns(plan.block(0))) * inside + whole)


def rounding_error(marks: Iterable[Path]) -> float:
    """Root of the mean relative squared error of rounded weights, from the marks of their tasks."""
    found = (work_files.read_json(mark).get("error", 0.0) for mark in marks)
    errors = [error for error in found if error is not None]  # what is not finite
    return math.sqrt(sum(errors) / len(errors)) if errors else 0.0


def training_chunks(chunks: int) -> int:
    """How many of so many chunks are trained on; those behind them are held out."""
    return chunks - max(1, chunks // HELD_OUT)


def fit(task: Task, tell: Tell) -> tuple[Values, list[float]]:
    """Train; returns the best values, as they will be written, and the held-out losses, that of the start first: the
    only one, where there is nothing to train.

    Raises RunError where that is not finite.
    """
    state = _load(task) if task.file.exists() else _begin(task)
    share = 1 / (task.epochs * task.batches)
    while task.trained and len(state.losses) <= task.epochs and state.failures < PATIENCE:
        epoch = len(state.losses)
        order = torch.randperm(task.batches, generator=rewrite.generator(f"{task.name}/{epoch}", task.seed))
        for count, number in enumerate(order.tolist()):
            left = 1 - (epoch - 1 + count / task.batches) / task.epochs
            loss = _step(state, task, number, left / 2**state.failures)
            tell(
                f"{task.name}: epoch {epoch} of {task.epochs}, loss {loss:.4g}, held out {min(state.losses):.4g}", share
            )
        _judge(state, task.held_out(_written(state.values, task)))
        _save(state, task.file)
    return _written(state.best, task), state.losses


def _begin(task: Task) -> _State:
    values, best = ({name: item.start.float().clone() for name, item in task.trained.items()} for _ in range(2))
    means, squares = ({name: torch.zeros_like(value) for name, value in values.items()} for _ in range(2))
    loss = task.held_out(_written(values, task))
    if not math.isfinite(loss):
        raise RunError(
            f"{task.name}: before fine-tuning the loss on held-out rows is {loss}; the activations overflow there, so "
            "run again without --finetune, or with other calibration text"
        )
    return _State(values, best, means, squares, [loss])


def _written(values: Values, task: Task) -> Values:
    """Values as they will be written, in float32."""
    return {name: value.to(task.trained[name].dtype).float() for name, value in values.items()}


def _step(state: _State, task: Task, number: int, share: float) -> float:
    """One step of Adam (Kingma and Ba 2015, algorithm 1), at a share of the rates."""
    leaves = {name: value.detach().requires_grad_() for name, value in _written(state.values, task).items()}
    loss = task.gradients(leaves, number)
    state.steps += 1
    first, second = (1 - beta**state.steps for beta in BETAS)
    for name, leaf in leaves.items():
        assert leaf.grad is not None, name
        mean, square = state.means[name], state.squares[name]
        mean.lerp_(leaf.grad, 1 - BETAS[0])
        square.mul_(BETAS[1]).addcmul_(leaf.grad, leaf.grad, value=1 - BETAS[1])
        size, rate = (square / second).sqrt_().add_(EPSILON), task.trained[name].rate
        if isinstance(rate, Tensor):
            mean, rate = mean * rate, 1.0
        state.values[name].addcdiv_(mean, size, value=-share * rate / first)
    return loss


def _judge(state: _State, loss: float) -> None:
    """Keep what is better than everything before; go on at half the rate where it is not, or hardly."""
    best = min(state.losses)
    if loss < best:
        for name, value in state.values.items():
            state.best[name].copy_(value)
    if not loss < (1 - LEAST_GAIN) * best:  # also where it is NaN
        state.failures += 1
        state.steps = 0
        for name, value in state.best.items():
            state.values[name].copy_(value)
            state.means[name].zero_()
            state.squares[name].zero_()
    state.losses.append(loss if math.isfinite(loss) else math.inf)


def _save(state: _State, file: Path) -> None:
    kinds = {"value": state.values, "best": state.best, "mean": state.means, "square": state.squares}
    tensors = {f"{kind}/{name}": tensor for kind, values in kinds.items() for name, tensor in values.items()}
    tensors["losses"] = torch.tensor(state.losses, dtype=torch.float64)
    tensors["counts"] = torch.tensor([state.steps, state.failures])
    work_files.write_tensors(file, tensors)


def _load(task: Task) -> _State:
    tensors = work_files.read_tensors(task.file)
    losses, counts = tensors.pop("losses").tolist(), tensors.pop("counts").tolist()
    kinds: dict[str, Values] = {}
    for name, tensor in tensors.items():
        kind, _, rest = name.partition("/")
        kinds.setdefault(kind, {})[rest] = tensor.to(task.trained[rest].start.device)
    return _State(kinds["value"], kinds["best"], kinds["mean"], kinds["square"], losses, *counts)
