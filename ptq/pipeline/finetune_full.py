"""Fine-tuning of the whole model (Tseng et al. 2024, arXiv:2402.04396, section 5): scales, sign vectors, norms, biases
and the head, where that is not packed, follow the original's predictions; the loss is the KL divergence, averaged over
the calibration tokens.

    tuned/full.epoch.safetensors  state of the training, after each epoch
    tuned/full.safetensors        what has been trained
    tuned/full.json               it is in the shards; the losses

The original's logits are never kept: its hidden states behind the last block are (`teacher/`; of a model that is
rotated for good, those of the rotated one), and its head makes logits of them where they are compared, a few tokens at
a time. Of the packed model, one block has gradients at a time: on the way up only what enters each block is kept, on
the way down the block is run again. A head that is tied to the embedding is trained as both. All of it is done by the
first process alone.
"""

import torch
from jaxtyping import Float, Int
from torch import Tensor

from ptq.files import work_files
from ptq.files.json_numbers import six_digits
from ptq.hf.blocks import PartialModel, row_by_row
from ptq.layers.linear import config_entry
from ptq.layers.packed_weight import INPUT_SIGNS, OUTPUT_SIGNS
from ptq.ops import free_memory
from ptq.pipeline import finetune, trainable
from ptq.pipeline.ends import plain_matrix
from ptq.pipeline.progress import Progress
from ptq.pipeline.tasks import Tasks
from ptq.pipeline.trainable import Trained, Values
from ptq.planning.plan import weights_of
from ptq.statistics.divergence import divergence
from ptq.weights.grouped import SCALE, has_scales

RATE = 0.1
"""Adam's steps, as a share of those within a block: errors of all blocks add up here."""
LOGITS = 1 << 22
"""Logits of a model that are made at a time."""


def tune(tasks: Tasks, rows: Int[Tensor, "samples t"], progress: Progress) -> None:
    """Train the whole model, put the result into the shards, and send the probe through it again."""
    mark, file = (tasks.work / "tuned" / name for name in ("full.json", "full.safetensors"))
    if tasks.workers.first and not mark.exists():
        if not file.exists():
            _train(tasks, rows, progress)
        values = work_files.read_tensors(file)
        losses = six_digits(values.pop("losses").tolist())
        tasks.shards.place(trainable.written(tasks.job, trainable.shared(tasks.job.plan.linears, values)))
        _measure(tasks)
        tasks.place(mark, {}, {"whole model": losses})
    tasks.workers.wait()


def losses(tasks: Tasks) -> dict[str, list[float | None]]:
    """Mean KL divergences on held-out rows, nats per token."""
    mark = tasks.work / "tuned" / "full.json"
    return work_files.read_json(mark) if mark.exists() else {}


def _train(tasks: Tasks, rows: Int[Tensor, "samples t"], progress: Progress) -> None:
    model = _Model(tasks, rows)
    count = len(model.ids)
    batches, epochs = finetune.training_chunks(count), tasks.job.plan.finetune_epochs

    def held_out(values: Values) -> float:
        return sum(model.loss(values, number) for number in range(batches, count)) / (count - batches)

    task = finetune.Task(
        "whole model", tasks.job.recipe.seed, model.trained(), model.gradients, held_out, batches, epochs,
        tasks.work / "tuned" / "full.epoch.safetensors",
    )  # fmt: skip
    with progress.training(weights_of(tasks.job.plan.linears), epochs) as tell:
        best, losses = finetune.fit(task, tell)
    found = {**best, "losses": torch.tensor(losses, dtype=torch.float64)}
    work_files.write_tensors(task.file.with_name("full.safetensors"), found)
    task.file.unlink(missing_ok=True)


def _measure(tasks: Tasks) -> None:
    """Send the probe through the packed model, as it is now."""
    matrices = [tasks.matrix(linear) for linear in tasks.job.embeddings]
    hidden = tasks.job.embed(matrices, tasks.probe.states(0)["ids"])
    for index in range(tasks.job.plan.blocks):
        hidden = row_by_row(tasks.packed_block(index), hidden)
    tasks.probe.replace(hidden)


class _Model:
    """The packed model in training, and its teacher."""

    def __init__(self, tasks: Tasks, rows: Int[Tensor, "samples t"]) -> None:
        self.tasks, self.job = tasks, (job := tasks.job)
        self.ids = tasks.chunks_of(rows)
        self.linears = [linear for linear in job.plan.linears if linear.statistics]
        self.share = RATE * finetune.rounding_error(map(tasks.mark, self.linears))
        self.embedding, self.head = (f"{linear.name}.weight" for linear in (job.embedding, job.head))
        self.teacher = self._teacher()
        self.bottom, self.blocks = job.end_part("packed"), dict[int, PartialModel]()
        self.bottom.load(job.beside_embedding())
        head = tasks.matrix(job.head) if job.head.format is not None else None
        self.frozen_head = None if head is None else head.whole(job.head.k).to(job.device)
        tied = job.head == job.embedding and head is None  # and trained
        self.frozen_embedding = None if tied else tasks.matrix(job.embedding)
        size = 4 * weights_of(job.plan.linears)
        self.keep = 2 * size < free_memory.available(job.device)

    def _teacher(self) -> PartialModel:
        """What makes logits of the teacher's states; with other tensors, those of the packed model."""
        job, model = self.job, trainable.taught_by(self.job.plan)
        part, rotated = job.end_part(model), model == "rotated"
        head = job.rewritten(job.head, torch.float32) if rotated else job.tensor(job.head.source)
        last = job.rewritten_last() if rotated else {name: job.tensor(name) for name in job.final_tensors}
        part.load({job.lm_head: head, **last})
        return part

    def trained(self) -> dict[str, Trained]:
        """How scales, sign vectors, norms, biases and the head are trained, from where they are now."""
        job, plan = self.job, self.job.plan
        names = {*plan.kept, *plan.unit_norms, *job.final_tensors} - job.beside_embedding().keys()
        for linear in self.linears:
            leaves = (INPUT_SIGNS, OUTPUT_SIGNS, "bias", *([SCALE] if has_scales(linear.format) else []))
            names |= {f"{linear.name}.{leaf}" for leaf in leaves} & self.tasks.shards.layout.tensors.keys()
        values = trainable.read(job, {name: self.tasks.shards.read(name) for name in sorted(names)})
        found = trainable.vectors(job, self.linears, values, self.share)
        if self.frozen_head is not None:
            return found
        head = self.tasks.shards.read(self.head)
        return {**found, self.head: trainable.matrix(head.float().to(job.device), head.dtype, self.share)}

    def loss(self, values: Values, number: int) -> float:
        """Mean KL divergence of a chunk's tokens, nats."""
        everything = trainable.shared(self.linears, values)
        with torch.no_grad():
            return self._divergence(everything, self._climb(everything, number)[-1], number)

    def gradients(self, values: Values, number: int) -> float:
        """The same, its gradients left in the values."""
        everything = trainable.shared(self.linears, values)
        states = self._climb(everything, number)
        hidden = states.pop().requires_grad_()
        loss = self._divergence(everything, hidden, number)
        for index in reversed(range(self.job.plan.blocks)):
            entered = states.pop().requires_grad_()
            self._run(everything, index, entered).backward(hidden.grad)
            hidden = entered
        if self.embedding in values:
            self._embed_back(values[self.embedding], hidden.grad, number)
        return loss

    @torch.no_grad()
    def _climb(self, values: Values, number: int) -> list[Float[Tensor, "batch t k"]]:
        """The hidden states of a chunk before every block and behind the last."""
        matrix = self.frozen_embedding or plain_matrix(values[self.embedding])
        used, places = self._tokens(number)
        states = [self._embed(matrix.rows(used, self.job.embedding.k).float(), places)]
        for index in range(self.job.plan.blocks):
            states.append(self._run(values, index, states[-1]))
        return states

    def _tokens(self, number: int) -> tuple[Int[Tensor, " u"], Int[Tensor, "batch t"]]:
        """The tokens that a chunk has, and which of them is where."""
        used, places = self.ids[number].unique(return_inverse=True)
        return used, places.to(self.job.device)

    def _embed(self, rows: Float[Tensor, "u k"], places: Int[Tensor, "batch t"]) -> Float[Tensor, "batch t k"]:
        return self.bottom.differentiated({self.embedding: rows.to(self.job.device)}, ids=places)

    def _embed_back(self, weight: Float[Tensor, "v k"], grad: Tensor | None, number: int) -> None:
        """Add to a weight's gradient what comes through its rows for the tokens of a chunk."""
        used, places = self._tokens(number)
        rows = weight.detach()[used.to(weight.device)].requires_grad_()
        self._embed(rows, places).backward(grad)
        assert weight.grad is not None and rows.grad is not None
        weight.grad.index_add_(0, used.to(weight.device), rows.grad)

    def _run(self, values: Values, index: int, hidden: Float[Tensor, "batch t k"]) -> Float[Tensor, "batch t k"]:
        part = self._block(index)
        inside = {name: value for name, value in values.items() if name.startswith(part.prefix)}
        return part.differentiated(inside, hidden=hidden)

    def _block(self, index: int) -> PartialModel:
        """A block whose weights stand for their codes; kept where there is memory for all of them."""
        if index in self.blocks:
            return self.blocks[index]
        part = PartialModel(self.job.config, self.job.family, index, self.job.device)
        tensors = self.tasks.written(part.prefix)
        packed = self.tasks.decided(linear for linear in self.linears if linear.name.startswith(part.prefix))
        trainable.freeze(part, packed, tensors)
        part.pack({x.name: config_entry(x) for x in self.job.plan.block(index) if x.format and not x.statistics})
        part.quantize_cache(self.job.plan.cache)
        prefixes = tuple(f"{linear.name}." for linear in packed)
        part.load({name: tensor for name, tensor in tensors.items() if not name.startswith(prefixes)})
        if self.keep:
            self.blocks[index] = part
        return part

    def _divergence(self, values: Values, hidden: Float[Tensor, "batch t k"], number: int) -> float:
        """Mean KL divergence behind the last block; where there are gradients, they are left in the leaves."""
        job, total = self.job, 0.0
        taught = self.tasks.teacher.read(self.tasks.teacher.files(job.plan.blocks)[number]).flatten(0, 1)
        head = values[self.head] if self.frozen_head is None else self.frozen_head
        tensors = {job.lm_head: head, **{name: values[name] for name in job.final_tensors if name in values}}
        size = max(1, LOGITS // job.head.n)
        for start in range(0, len(taught), size):
            here = slice(start, start + size)
            p = self.teacher.logits(taught[None, here]).log_softmax(-1)
            q = self.teacher.differentiated(tensors, hidden=hidden.flatten(0, 1)[None, here], head=True).log_softmax(-1)
            loss = divergence(p, q).sum() / len(taught)
            if loss.requires_grad:
                loss.backward()
            total += float(loss.detach())
        return total
