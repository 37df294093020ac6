"""Train a small image classifier on handwritten digits: uneven ranks, and checkpoints from which it goes on.

    python scripts/train_digits.py                                                  # one process
    torchrun --nproc-per-node 2 scripts/train_digits.py --share 3 --device cpu      # two ranks, equally fast
    hetdeploy up scripts/train_digits.py --checkpoints digits                       # start again to go on from there

The images (1797 of 8 by 8 pixels) come with scikit-learn. Every step has a global batch, the same samples whatever the
machines; ``--share`` says how much of it this rank computes, in proportion to the other ranks' shares. A rank that is
stopped and started again goes on with the step, the samples, the dropout and the rounding errors it stopped at.
"""

import argparse
import datetime
import gc
import os
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.nn.functional  # before there is a group: see train_gpt.py
from torch import Tensor, nn
from torch.distributed.elastic.multiprocessing.errors import record
from torch.nn import functional
from torch.utils.data import DataLoader, TensorDataset

from hetdeploy.train import AllReduce, TrainError, choose_device
from hetdeploy.train.checkpoint import Checkpoints
from hetdeploy.train.data import Batches, ShareSampler, collate, seed_for

HELD_OUT = 297  # images that are not trained on
BRIGHTEST = 16.0  # value of a white pixel


def load_images() -> tuple[TensorDataset, Tensor, Tensor]:
    """The training set, and the images and digits that are held out."""
    try:
        from sklearn.datasets import load_digits
    except ImportError:
        sys.exit("the images come with scikit-learn, which is not here: pip install scikit-learn")
    digits = load_digits()
    images = torch.from_numpy(digits.images).float().unsqueeze(1) / BRIGHTEST
    labels = torch.from_numpy(digits.target).long()
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(0))  # the same on every rank
    images, labels = images[order], labels[order]
    return TensorDataset(images[HELD_OUT:], labels[HELD_OUT:]), images[:HELD_OUT], labels[:HELD_OUT]


def build_model() -> nn.Module:
    """Images (batch, 1, 8, 8) in, logits (batch, 10) out."""
    return nn.Sequential(
        nn.Conv2d(1, 16, 3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(16, 32, 3, padding=1),
        nn.ReLU(),
        nn.Flatten(),
        nn.Dropout(0.25),
        nn.Linear(32 * 4 * 4, 10),
    )


def join_group(share: float) -> tuple[int, list[float]]:
    """This process's rank, and the shares of all ranks; without torchrun there is one, and no process group."""
    if "WORLD_SIZE" not in os.environ:
        return 0, [share]
    dist.init_process_group("gloo", timeout=datetime.timedelta(minutes=5))
    shares = [share] * dist.get_world_size()
    dist.all_gather_object(shares, share)
    return dist.get_rank(), shares


def train(args: argparse.Namespace, rank: int, shares: list[float]) -> None:
    device = choose_device(args.device)
    dataset, held_out, answers = load_images()
    torch.manual_seed(args.seed)  # the model's: equal on all ranks
    model = build_model().to(device)
    torch.manual_seed(seed_for(args.seed, rank))  # dropout's: different on each
    optimizer = torch.optim.SGD(model.parameters(), lr=args.lr, momentum=0.9)
    batches = Batches(len(dataset), args.batch_size, seed=args.seed)
    sync = AllReduce(model, wire=args.wire)

    shared = {"model": model, "optimizer": optimizer, "batches": batches}
    own = {"sync": sync}  # a rank's rounding errors, still to be sent
    checkpoints = Checkpoints(args.checkpoints) if args.checkpoints else None
    start = checkpoints.load(shared, own) if checkpoints else 0
    if start:
        print(f"rank {rank} goes on after step {start}", flush=True)

    sampler = ShareSampler(batches, rank, shares, start=start, stop=max(start, args.steps))
    # A generator of its own: a new loader draws from it, and after a resume the random numbers would be others.
    loader = DataLoader(dataset, batch_sampler=sampler, collate_fn=collate, generator=torch.Generator())
    shown_at, since_then = time.perf_counter(), 0
    for step, batch in enumerate(loader, start + 1):
        samples, loss = 0, torch.zeros(())
        if batch is not None:  # None where this rank's share of the batch is less than one sample
            images, labels = (each.to(device) for each in batch)
            samples, loss = len(labels), functional.cross_entropy(model(images), labels, reduction="sum")
            loss.backward()
        result = sync.reduce(samples=samples, loss=loss)
        optimizer.step()
        optimizer.zero_grad()
        if checkpoints and (step % args.save_every == 0 or step == args.steps):
            checkpoints.save(step, shared, own)
        since_then += samples
        if step % args.log_every == 0 or step == args.steps:
            now = time.perf_counter()
            print(f"step {step} loss {result.loss:.4f} samples/s {since_then / (now - shown_at):.1f}", flush=True)
            shown_at, since_then = now, 0

    model.eval()
    with torch.no_grad():
        right = (model(held_out.to(device)).argmax(1).cpu() == answers).sum()
    print(f"rank {rank} knows {right} of {len(answers)} digits that it was not trained on", flush=True)


@record
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=300, help="in all, with those before a checkpoint")
    parser.add_argument("--batch-size", type=int, default=50, help="images in a step, of all ranks together")
    parser.add_argument("--share", type=float, default=1.0, help="of the batch for this rank, against the other ranks'")
    parser.add_argument("--lr", type=float, default=0.05)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--device", choices=("auto", "cuda", "rocm", "mps", "cpu"), help="default: the best there is")
    parser.add_argument("--wire", choices=("fp32", "bf16", "int8"), default="fp32", help="how gradients travel")
    parser.add_argument("--checkpoints", type=Path, help="folder to save to, and to go on from")
    parser.add_argument("--save-every", type=int, default=50, help="steps between two checkpoints")
    parser.add_argument("--log-every", type=int, default=10, help="steps between two lines of progress")
    args = parser.parse_args()
    for name in ("steps", "save_every", "log_every"):
        if getattr(args, name) <= 0:
            parser.error(f"--{name.replace('_', '-')} must be above 0")
    rank, shares = join_group(args.share)
    failure = None
    try:
        train(args, rank, shares)
    except TrainError as error:
        failure = f"rank {rank}: {error}"
    if dist.is_initialized():
        gc.collect()  # what used the group goes before it
        dist.destroy_process_group()
    if failure:
        sys.exit(failure)


if __name__ == "__main__":
    main()
