"""Train a small GPT on bytes of text, on one machine or on several.

    python scripts/train_gpt.py                                       # one process, the best device there is
    torchrun --nproc-per-node 2 scripts/train_gpt.py --device cpu     # two ranks on this machine
    torchrun --nnodes 2 ... scripts/train_gpt.py --size small         # one on each of two
    hetdeploy up --crew scripts/train_gpt.py --sync assist            # a leader, and helpers that come and go

The model predicts the next byte. The default text is the source of Python's own standard library, which every machine
has; ``--data FILE`` trains on any other. Each rank draws its batches from its own part of the text that *it* sees: rank
r of N from the r-th of N equal parts. Where machines have different minor versions of Python their texts differ a
little, and so the parts may overlap a little. That costs a few repeated samples and nothing else.

How ranks train together is ``--sync``:

plain      with nothing but torch.distributed: gradients are averaged over all samples of a step, also where ranks have
           batches of different sizes. DDP does it where all ranks have devices of one kind that DDP can exchange from.
           Otherwise (a Mac's GPU, or a Mac beside an NVIDIA GPU) each rank keeps its gradients in one flat buffer,
           which takes the way through CPU memory.
allreduce  the same by hetdeploy.train, for any devices: exchanged while backward still runs, in the format ``--wire``;
           a rank may have no samples (``--batch-size 0``).
ddp        DDP by hetdeploy.train, for CPU ranks or CUDA ranks.
assist     rank 0 trains on the global batch, the batches of all ranks together; the other ranks compute what they can
           of it in time. In a crew every helper is a rank 0 too, and the global batch is the leader's ``--batch-size``.
           All draw from the whole text: ``--data`` gives all the same one.
diloco     every rank trains by itself, as fast as it can, and every so often (``--every``) they meet in the middle.
"""

import argparse
import datetime
import gc
import json
import math
import operator
import os
import sys
import sysconfig
import time
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
import torch.distributed as dist

# The optimizer's first step imports this module (torch 2.13), and its functions bind the process group of that moment
# as a default argument: the group would outlive destroy_process_group, and its threads abort the interpreter's exit.
import torch.distributed.nn.functional
from torch import Tensor, nn
from torch.distributed.elastic.multiprocessing.errors import record
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel


@dataclass(frozen=True)
class Size:
    layers: int
    heads: int
    width: int
    context: int  # bytes that the model looks back over
    batch: int  # samples per step of one rank
    lr: float
    vocabulary: int = 256


WARMUP_STEPS = 20
AGREED = ("size", "steps", "lr", "seed", "backend", "sync", "wire", "micro_batch", "every")
SIZES = {
    "nano": Size(layers=2, heads=4, width=128, context=64, batch=16, lr=1e-3),  # 0.4 million parameters
    "small": Size(layers=6, heads=6, width=384, context=256, batch=16, lr=1e-3),  # 10.8 million
    # Bytes need 256 rows of the embedding. It has all of GPT-2's, so that the model has GPT-2's 124 million parameters
    # and its gradients take GPT-2's 498 MB on the wire.
    "gpt2": Size(layers=12, heads=12, width=768, context=1024, batch=4, lr=6e-4, vocabulary=50257),
}


# --- the model: GPT-2's architecture (Radford et al. 2019), without dropout ---


class Block(nn.Module):
    """Attention over the earlier bytes, then a two-layer perceptron; each adds to the stream that passes by."""

    def __init__(self, size: Size) -> None:
        super().__init__()
        self.heads = size.heads
        self.before_attention = nn.LayerNorm(size.width)
        self.queries_keys_values = nn.Linear(size.width, 3 * size.width)
        self.attention_out = nn.Linear(size.width, size.width)
        self.before_perceptron = nn.LayerNorm(size.width)
        self.perceptron_in = nn.Linear(size.width, 4 * size.width)
        self.perceptron_out = nn.Linear(4 * size.width, size.width)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        qkv = self.queries_keys_values(self.before_attention(x))
        q, k, v = qkv.view(batch, length, 3, self.heads, width // self.heads).permute(2, 0, 3, 1, 4)
        attended = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.attention_out(attended.transpose(1, 2).reshape(batch, length, width))
        hidden = functional.gelu(self.perceptron_in(self.before_perceptron(x)), approximate="tanh")
        return x + self.perceptron_out(hidden)


class GPT(nn.Module):
    """Bytes (batch, length) in, logits (batch, length, vocabulary) of each next byte out."""

    def __init__(self, size: Size) -> None:
        super().__init__()
        self.size = size
        self.bytes = nn.Embedding(size.vocabulary, size.width)
        self.positions = nn.Embedding(size.context, size.width)
        self.blocks = nn.Sequential(*(Block(size) for _ in range(size.layers)))
        self.last_norm = nn.LayerNorm(size.width)
        for name, parameter in self.named_parameters():
            if name.endswith("bias"):
                nn.init.zeros_(parameter)
            elif parameter.dim() == 2:
                # What writes into the stream starts smaller, by the number of writers, or the stream would grow.
                writes = name.endswith("_out.weight")
                nn.init.normal_(parameter, std=0.02 / math.sqrt(2 * size.layers) if writes else 0.02)

    def forward(self, text: Tensor) -> Tensor:
        x = self.bytes(text) + self.positions(torch.arange(text.shape[1], device=text.device))
        return functional.linear(self.last_norm(self.blocks(x)), self.bytes.weight)  # one table, used both ways


# --- the text ---


def load_text(file: Path | None) -> Tensor:
    """The bytes of ``file``, or of the standard library's modules in alphabetical order."""
    library = Path(sysconfig.get_path("stdlib"))
    files = [file] if file else sorted(library.glob("*.py"))
    if not files:
        sys.exit(f"no Python sources in {library}: name a text with --data FILE")
    try:
        text = b"".join(path.read_bytes() for path in files)
    except OSError as error:
        sys.exit(f"cannot read the text: {error}")
    if not text:
        sys.exit(f"the text is empty: {file or library}")
    return torch.frombuffer(bytearray(text), dtype=torch.uint8)


def part_of_rank(text: Tensor, rank: int, world: int, context: int) -> Tensor:
    part = text[rank * len(text) // world : (rank + 1) * len(text) // world]
    if len(part) <= context:
        sys.exit(f"text too short: rank {rank} of {world} has {len(part)} bytes and needs more than {context}")
    return part


def draw_batch(text: Tensor, samples: int, context: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """``samples`` random pieces of the text, and the same pieces one byte further on: (samples, context) each."""
    starts = torch.randint(len(text) - context, (samples,), generator=generator).tolist()
    pieces = torch.stack([text[start : start + context + 1] for start in starts]).long()
    return pieces[:, :-1], pieces[:, 1:]


# --- the ranks ---


def choose_device(wanted: str) -> torch.device:
    if wanted == "auto":
        wanted = "cuda" if torch.cuda.is_available() else "mps" if torch.backends.mps.is_available() else "cpu"
    if wanted == "cuda":
        if not torch.cuda.is_available():
            sys.exit("--device cuda: this torch sees no CUDA device")
        device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")) % torch.cuda.device_count())
        torch.cuda.set_device(device)
        return device
    if wanted == "mps" and not torch.backends.mps.is_available():
        sys.exit("--device mps: this torch sees no MPS device")
    return torch.device(wanted)


def join_group(backend: str, device: torch.device, timeout: float) -> tuple[int, int]:
    """This process's rank and the number of ranks; without torchrun there is one, and no process group."""
    if "WORLD_SIZE" not in os.environ:
        return 0, 1
    if backend == "nccl":
        if device.type != "cuda":
            sys.exit(f"--backend nccl exchanges between CUDA devices and this rank's is {device}: use --backend gloo")
        backend = "cpu:gloo,cuda:nccl"  # what passes through CPU memory still needs gloo
    dist.init_process_group(backend, timeout=datetime.timedelta(seconds=timeout))
    return dist.get_rank(), dist.get_world_size()


def agree(mine: dict[str, Any], world: int) -> list[dict[str, Any]]:
    """What each rank is about to do. Ranks that do different things would hang, or crash inside a collective."""
    ranks = [mine] * world
    if world > 1:
        dist.all_gather_object(ranks, mine)
    for key in AGREED:
        for rank, theirs in enumerate(ranks):
            if theirs[key] != ranks[0][key]:
                flag = key.replace("_", "-")
                sys.exit(f"--{flag} is {ranks[0][key]} on rank 0 and {theirs[key]} on rank {rank}: give all the same")
    if not sum(theirs["batch_size"] for theirs in ranks):
        sys.exit("--batch-size is 0 on every rank: give one of them samples")
    return ranks


def copy_weights_of_rank_0(model: nn.Module) -> None:
    with torch.no_grad():
        for parameter in model.parameters():
            on_cpu = parameter.cpu()
            dist.broadcast(on_cpu, src=0)
            parameter.copy_(on_cpu)


def must_stage(ranks: list[dict[str, Any]]) -> bool:
    """All ranks must exchange in the same way, so one that cannot use DDP decides for all."""
    devices = {theirs["device"] for theirs in ranks}
    return any(theirs["stage"] for theirs in ranks) or len(devices) > 1 or "mps" in devices


class StagedGradients:
    """All gradients in one flat buffer on the device, and that buffer's twin in CPU memory, which gloo can send.

    Costs one more copy of the gradients on each side (none on the device where that is the CPU).
    """

    def __init__(self, model: nn.Module) -> None:
        parameters = list(model.parameters())
        self.flat = torch.zeros(sum(parameter.numel() for parameter in parameters), device=parameters[0].device)
        self.on_cpu = self.flat.cpu()  # the same memory where the device is the CPU
        for parameter, part in zip(parameters, self.flat.split([p.numel() for p in parameters]), strict=True):
            parameter.grad = part.view_as(parameter)  # backward adds into the buffer

    def zero(self) -> None:
        self.flat.zero_()

    def average(self) -> None:
        self.on_cpu.copy_(self.flat)  # blocking on purpose: asynchronous copies from MPS can arrive damaged
        dist.all_reduce(self.on_cpu)
        self.flat.copy_(self.on_cpu).div_(dist.get_world_size())


# --- the training ---


@dataclass
class Job:
    """What every way of training works with."""

    args: argparse.Namespace
    device: torch.device
    rank: int
    ranks: list[dict[str, Any]]  # what each rank was told
    text: Tensor
    model: GPT
    optimizer: torch.optim.Optimizer
    generator: torch.Generator  # this rank's, for its batches
    metrics: Any = None  # hetdeploy.train.Metrics
    curve: list[tuple[int, float]] = field(default_factory=list)  # the losses that were shown, by step
    latest: Tensor | float = 0.0  # the last one
    samples: int = 0  # of this rank since then
    shown_at: float = field(default_factory=time.perf_counter)

    @property
    def device_ids(self) -> list[int | None] | None:
        """For DDP."""
        return [self.device.index] if self.device.type == "cuda" else None

    def batch(self) -> tuple[Tensor, Tensor]:
        return draw_batch(self.text, self.args.batch_size, self.model.size.context, self.generator)

    def loss(self, model: nn.Module, batch: tuple[Tensor, Tensor], reduction: str = "mean") -> Tensor:
        inputs, targets = batch
        logits = model(inputs.to(self.device))
        return functional.cross_entropy(logits.flatten(0, 1), targets.to(self.device).flatten(), reduction=reduction)

    def update(self, step: int) -> None:
        """The gradients are there: change the weights."""
        nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.param_groups[0]["lr"] = self.args.lr * min(1.0, step / WARMUP_STEPS)
        self.optimizer.step()

    def show(self, step: int, loss: Tensor | float, samples: int, record: Any = None) -> None:
        self.latest = loss
        self.samples += samples
        if self.metrics and record:
            self.metrics.write(record)
        if step % self.args.log_every and step != self.args.steps:
            return
        self.curve.append((step, float(loss)))
        now = time.perf_counter()
        print(f"step {step} loss {float(loss):.4f} samples/s {self.samples / (now - self.shown_at):.1f}", flush=True)
        self.shown_at, self.samples = now, 0


def train_plain(job: Job) -> None:
    staged: StagedGradients | None = None
    trained: nn.Module = job.model
    if len(job.ranks) > 1:
        copy_weights_of_rank_0(job.model)
        if must_stage(job.ranks):
            staged = StagedGradients(job.model)
        else:
            trained = DistributedDataParallel(job.model, device_ids=job.device_ids)
    # Both ways of exchange divide by the number of ranks. To average over samples, a rank's loss counts by its share.
    batch_sizes = [theirs["batch_size"] for theirs in job.ranks]
    weight = job.args.batch_size * len(batch_sizes) / sum(batch_sizes)
    for step in range(1, job.args.steps + 1):
        loss = job.loss(trained, job.batch())
        staged.zero() if staged else job.optimizer.zero_grad()
        (loss * weight).backward()
        if staged:
            staged.average()
        job.update(step)
        job.show(step, loss.detach(), job.args.batch_size)


# With hetdeploy.train, losses are sums over samples (here: bytes), and it divides by the number of all ranks' samples.


def train_symmetric(job: Job, train: ModuleType) -> None:
    if job.args.sync == "ddp":
        model = sync = train.WeightedDDP(job.model, device_ids=job.device_ids)
    else:
        model, sync = job.model, train.AllReduce(job.model, wire=job.args.wire)
    for step in range(1, job.args.steps + 1):
        loss: Tensor | float = 0.0
        if job.args.batch_size:
            loss = job.loss(model, job.batch(), "sum")
            loss.backward()
        record = sync.reduce(samples=job.args.batch_size * job.model.size.context, loss=loss)
        job.update(step)
        job.optimizer.zero_grad()
        job.show(step, record.loss, job.args.batch_size, record)


def train_assist(job: Job, train: ModuleType) -> None:
    from hetdeploy.train.data import seed_for

    samples, length = job.args.micro_batch, job.model.size.context
    micro_batches = sum(theirs["batch_size"] for theirs in job.ranks) // samples
    with train.Assist(job.model, micro_batches=micro_batches, wire=job.args.wire) as assist:
        if assist.leads and len(job.ranks) > 1:
            assist.wait_for(len(job.ranks) - 1, job.args.timeout)  # torchrun has started them already
        for step in assist.steps(job.args.steps):
            mine: list[Tensor] = []
            for micro in step:
                job.generator.manual_seed(seed_for(job.args.seed, step.number, micro))
                loss = job.loss(job.model, draw_batch(job.text, samples, length, job.generator), "sum")
                loss.backward()
                step.count(samples * length, loss)
                mine.append(loss.detach() / (samples * length))
            record = step.reduce()
            if record:
                job.update(step.number + 1)
                job.optimizer.zero_grad()
            # A helper knows the loss of its own part of the batch.
            loss_shown = record.loss if record else sum(mine) / len(mine)
            job.show(step.number + 1, loss_shown, samples * len(mine), step.record)


def train_diloco(job: Job, train: ModuleType) -> None:
    sync = train.DiLoCo(job.model, every=job.args.every, wire=job.args.wire)
    samples = job.args.batch_size * job.model.size.context
    left = job.args.steps * sum(theirs["batch_size"] for theirs in job.ranks) * job.model.size.context
    step = 0
    while left > 0:  # for all ranks together: a fast one takes more steps
        step += 1
        loss = job.loss(job.model, job.batch())
        job.optimizer.zero_grad()
        loss.backward()
        job.update(step)
        record = sync.step(samples, loss.detach() * samples)
        if record:
            left -= record.global_samples
        job.show(step, loss.detach(), job.args.batch_size, record)
    sync.finish()


HETDEPLOY = {"allreduce": train_symmetric, "ddp": train_symmetric, "assist": train_assist, "diloco": train_diloco}


def train_with_hetdeploy(job: Job) -> str | None:
    """Trains; or says what went wrong, on this rank or another one."""
    try:
        from hetdeploy import train
    except ImportError:
        sys.exit(f"--sync {job.args.sync} needs hetdeploy: pip install hetdeploy, or use --sync plain")
    try:
        if job.args.metrics:
            job.metrics = train.Metrics(job.args.metrics, job.rank)
        HETDEPLOY[job.args.sync](job, train)
        return None
    except train.TrainError as error:
        return f"rank {job.rank}: {error}"
    finally:
        if job.metrics:
            job.metrics.close()


def steps_or_seconds(text: str) -> int | datetime.timedelta:
    every = datetime.timedelta(seconds=float(text[:-1])) if text.endswith("s") else int(text)
    if every <= type(every)(0):
        raise ValueError(text)
    return every


def read_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--size", choices=SIZES, default="nano")
    parser.add_argument("--data", type=Path, help="the text (default: the sources of Python's standard library)")
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--batch-size", type=int, help="samples per step of this rank; may differ by rank")
    parser.add_argument("--lr", type=float, help="learning rate (default: by size)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--device", choices=("auto", "cuda", "mps", "cpu"), default="auto")
    parser.add_argument("--backend", choices=("gloo", "nccl"), default="gloo")
    parser.add_argument("--sync", choices=("plain", *HETDEPLOY), default="plain", help="how ranks train together")
    parser.add_argument("--stage", action="store_true", help="plain: through CPU memory even where DDP would do")
    parser.add_argument("--wire", choices=("fp32", "bf16", "int8"), default="fp32", help="how gradients travel")
    parser.add_argument("--micro-batch", type=int, default=2, help="assist: samples in one backward pass")
    parser.add_argument("--every", type=steps_or_seconds, default=20, help="diloco: steps, or seconds as in 30s")
    parser.add_argument("--timeout", type=float, default=300.0, help="deadline of every exchange, in seconds")
    parser.add_argument("--log-every", type=int, default=1, help="steps between two lines of progress")
    metrics = os.environ.get("HETDEPLOY_METRICS_DIR")  # a folder of the run, under `hetdeploy up` and `join`
    parser.add_argument("--metrics", type=Path, default=metrics, help="hetdeploy.train's records of steps go in here")
    parser.add_argument("--out", type=Path, help="rank 0 writes the losses here, as JSON")
    args = parser.parse_args()
    args.batch_size = SIZES[args.size].batch if args.batch_size is None else args.batch_size
    args.lr = SIZES[args.size].lr if args.lr is None else args.lr
    for name in ("steps", "batch_size", "lr", "micro_batch", "timeout", "log_every"):
        may_be_zero = name == "batch_size" and args.sync == "allreduce"
        if getattr(args, name) < 0 or (getattr(args, name) == 0 and not may_be_zero):
            parser.error(f"--{name.replace('_', '-')} must be above 0")
    if args.wire != "fp32" and args.sync in ("plain", "ddp"):
        parser.error(f"--sync {args.sync} exchanges fp32: leave out --wire, or use allreduce, assist or diloco")
    if args.sync == "assist" and args.batch_size % args.micro_batch:
        parser.error(f"--batch-size {args.batch_size} is no multiple of --micro-batch {args.micro_batch}")
    if args.sync == "diloco" and isinstance(args.every, int) and args.every > args.steps:
        parser.error(f"--every {args.every} is more than --steps {args.steps}: ranks would never meet")
    return args


@record
def main() -> None:
    args = read_arguments()
    size = SIZES[args.size]
    text = load_text(args.data)
    device = choose_device(args.device)
    rank, world = join_group(args.backend, device, args.timeout)
    mine = {key: getattr(args, key) for key in (*AGREED, "batch_size", "stage")}
    ranks = agree(mine | {"device": device.type}, world)

    torch.manual_seed(args.seed)  # the model's seed: equal on all ranks
    model = GPT(size).to(device)
    data_seed = torch.Generator().manual_seed(args.seed + 1 + rank)  # the data's: different on each
    my_text = part_of_rank(text, *((0, 1) if args.sync == "assist" else (rank, world)), size.context)

    parameters = sum(parameter.numel() for parameter in model.parameters())
    how = "gradients through CPU memory" if must_stage(ranks) else f"DDP over {args.backend}"
    how = f"{args.sync} in {args.wire}" if args.sync != "plain" else how if world > 1 else "alone"
    print(f"rank {rank} of {world} on {device}, {how}: {parameters:,} parameters, {len(my_text):,} bytes", flush=True)

    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr, betas=(0.9, 0.95), weight_decay=0.1)
    job = Job(args, device, rank, ranks, my_text, model, optimizer, data_seed)
    failure = train_plain(job) if args.sync == "plain" else train_with_hetdeploy(job)

    curves, losses = [job.curve] * world, [float(job.latest)] * world
    if world > 1:
        if not failure:
            dist.all_gather_object(curves, job.curve)
            dist.all_gather_object(losses, float(job.latest))
        # DDP must be gone before its group. Were it the last to hold the group, it would wait for gloo's threads with
        # Python's lock in hand, while they wait for that lock (torch 2.13).
        gc.collect()
        dist.destroy_process_group()
    if failure:
        sys.exit(failure)
    if args.out and rank == 0:
        counted = [1] if args.sync == "assist" else [theirs["batch_size"] for theirs in ranks]  # helpers know a part
        loss_of_all = sum(map(operator.mul, losses, counted)) / sum(counted)
        result = {"loss": loss_of_all, "parameters": parameters, "ranks": ranks, "curves": curves}
        args.out.write_text(json.dumps(result, indent=1, default=str) + "\n")


if __name__ == "__main__":
    main()
