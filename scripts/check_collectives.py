"""Check every collective of a torch.distributed job on CPU tensors over gloo, against answers known beforehand.

    torchrun --nproc-per-node 2 scripts/check_collectives.py          # two ranks on this machine
    torchrun --nnodes 2 ... scripts/check_collectives.py              # one on each of two
    python scripts/check_collectives.py --max-mb 1                    # one process, small

Each rank prints one line per check and, at the end, ``rank R: all N checks passed``. After a wrong answer the checks go
on, since the other ranks count on this one; at the end its first wrong answer is repeated and it exits with 1. An error
inside a collective (a peer gone, a timeout) ends the rank at once, with 1.

To try a launcher rather than a network, ``BREAK_RANK=N`` in the environment makes rank N exit with 3 after its first
collective.
"""

import argparse
import datetime
import gc
import os
import platform
import sys
import time

import torch
import torch.distributed as dist

# An optimizer's first step imports this module (torch 2.13), and its functions bind the process group of that moment
# as a default argument: the group would outlive destroy_process_group, and its threads abort the interpreter's exit.
import torch.distributed.nn.functional
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

BROKEN_EXIT_CODE = 3
NARROW = (torch.bfloat16, torch.float16, torch.int8, torch.uint8)  # their sums must stay small to be exact


def main() -> int:
    parser = argparse.ArgumentParser(description="Check every collective against known answers (gloo, CPU).")
    parser.add_argument("--max-mb", type=float, default=100.0, help="size of the largest all_reduce, in 10^6 bytes")
    parser.add_argument("--timeout", type=float, default=120.0, help="deadline of every collective, in seconds")
    args = parser.parse_args()
    if args.max_mb <= 0 or args.timeout <= 0:
        parser.error("--max-mb and --timeout must be above 0")
    timeout = datetime.timedelta(seconds=args.timeout)

    if "WORLD_SIZE" in os.environ:
        dist.init_process_group("gloo", timeout=timeout)
    else:
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1, timeout=timeout)
    report = Report(dist.get_rank(), dist.get_world_size())
    report.say(f"{report.world} ranks, torch {torch.__version__}, {platform.system()} {platform.machine()}")

    try:
        check_first_collective(report)
        check_all_reduce(report, args.max_mb)
        check_all_reduce_in_flight(report)
        check_broadcast(report)
        check_gathers(report)
        check_objects(report)
        check_reduce(report)
        check_reduce_scatter(report)
        check_all_to_all(report)
        check_barrier(report)
        check_send_recv(report)
        check_isend_irecv(report)
        check_two_groups(report, timeout)
        check_part_of_the_ranks(report, timeout)
        check_group_made_again(report, timeout)
        check_ddp(report)
        dist.barrier()  # nobody leaves while another rank still receives
    except RuntimeError as error:  # how torch.distributed reports peers that are gone and deadlines that are over
        report.say(f"stopped after {report.checks} checks: {error}")
        os._exit(1)  # at once: a group with a lost peer can neither be closed nor outlive the interpreter's end
    # DDP must be gone before its group. Were it the last to hold the group, it would wait for gloo's threads with
    # Python's lock in hand, while they wait for that lock (torch 2.13).
    gc.collect()
    dist.destroy_process_group()

    if report.first_wrong:
        report.say(f"first wrong answer: {report.first_wrong}")
        return 1
    report.say(f"all {report.checks} checks passed")
    return 0


class Report:
    """What one rank has seen so far: prints a line per check and remembers the first wrong answer."""

    def __init__(self, rank: int, world: int) -> None:
        self.rank, self.world = rank, world
        self.checks = 0
        self.first_wrong = ""

    @property
    def others(self) -> list[int]:
        return [other for other in range(self.world) if other != self.rank]

    def say(self, text: str) -> None:
        # One write: lines of ranks that share a terminal must not mix.
        sys.stdout.write(f"rank {self.rank}: {text}\n")
        sys.stdout.flush()

    def check(self, name: str, difference: str, note: str = "") -> None:
        """Count one check; an empty ``difference`` means that the answer was right."""
        self.checks += 1
        if not difference:
            self.say(f"ok {name}{note}")
            return
        self.first_wrong = self.first_wrong or f"{name}: {difference}"
        self.say(f"WRONG {name}: {difference}")

    def check_tensors(self, name: str, got: list[Tensor], expected: list[Tensor], note: str = "") -> None:
        self.check(name, next(filter(None, map(first_difference, got, expected)), ""), note)

    def not_in_gloo(self, name: str, error: RuntimeError) -> None:
        """Say that this gloo lacks a collective; any other error goes up."""
        reason = str(error).splitlines()[0]
        if "support" not in reason and "not implemented" not in reason.lower():
            raise error
        self.say(f"not in this gloo: {name} ({reason})")


def first_difference(got: Tensor, expected: Tensor) -> str:
    """The first element in which two tensors differ, in words; empty when they are equal."""
    if got.dtype != expected.dtype or got.shape != expected.shape:
        return f"got {got.dtype} {tuple(got.shape)}, expected {expected.dtype} {tuple(expected.shape)}"
    if torch.equal(got, expected):
        return ""
    # As strings, so that NaN, which differs from itself, is found as well.
    at = int((got.flatten() != expected.flatten()).nonzero()[0])
    return f"element {at} of {got.numel()}: got {got.flatten()[at].item()}, expected {expected.flatten()[at].item()}"


def pattern(count: int, rank: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """What ``rank`` contributes: small whole numbers that depend on position and rank, so that sums are exact."""
    modulus = 7 if dtype in NARROW else 1009
    return ((torch.arange(count, dtype=torch.int32) + 3 * rank) % modulus).to(dtype)


def pattern_sum(count: int, world: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """The sum of all ranks' patterns."""
    total = torch.zeros(count, dtype=torch.int32)
    for rank in range(world):
        total += pattern(count, rank, dtype).int()
    return total.to(dtype)


def check_first_collective(report: Report) -> None:
    number = torch.tensor([float(report.rank + 1)])
    dist.all_reduce(number)
    if os.environ.get("BREAK_RANK") == str(report.rank):
        report.say(f"BREAK_RANK={report.rank}: exit {BROKEN_EXIT_CODE}")
        os._exit(BROKEN_EXIT_CODE)  # as suddenly as a crash: nothing is closed, nobody is told
    report.check_tensors("first collective", [number], [torch.tensor([report.world * (report.world + 1) / 2])])


def check_all_reduce(report: Report, max_mb: float) -> None:
    largest = max(1, int(max_mb * 1e6) // 4) | 1  # odd: it does not divide evenly among ranks
    cases = [(torch.float32, count) for count in (1, 3, 1023, 262_147, largest) if count <= largest]
    others = (torch.float64, torch.float16, torch.bfloat16, torch.int8, torch.uint8, torch.int32, torch.int64)
    cases += [(dtype, count) for dtype in others for count in (1, 4099)]
    for dtype, count in cases:
        tensor = pattern(count, report.rank, dtype)
        started = time.perf_counter()
        dist.all_reduce(tensor)
        seconds = time.perf_counter() - started
        megabytes = tensor.nbytes / 1e6
        note = f" ({megabytes:.1f} MB in {seconds:.3f} s, {megabytes / seconds:.0f} MB/s)" if megabytes >= 1 else ""
        name = f"all_reduce {str(dtype).removeprefix('torch.')} x {count}"
        report.check_tensors(name, [tensor], [pattern_sum(count, report.world, dtype)], note)

    every = torch.stack([pattern(1023, rank) for rank in range(report.world)])
    for op, expected in (
        (dist.ReduceOp.MIN, every.amin(0)),
        (dist.ReduceOp.MAX, every.amax(0)),
        (dist.ReduceOp.PRODUCT, every.remainder(3).prod(0)),
    ):
        tensor = pattern(1023, report.rank)
        if op == dist.ReduceOp.PRODUCT:
            tensor = tensor.remainder(3)
        dist.all_reduce(tensor, op)
        report.check_tensors(f"all_reduce {str(op).rpartition('.')[2]}", [tensor], [expected])


def check_all_reduce_in_flight(report: Report) -> None:
    """Eight at once, in one group, waited for in reverse order."""
    counts = [1 + 10_007 * i for i in range(8)]
    tensors = [pattern(count, report.rank) for count in counts]
    works = [dist.all_reduce(tensor, async_op=True) for tensor in tensors]
    for work in reversed(works):
        work.wait()
    report.check_tensors("all_reduce, 8 in flight", tensors, [pattern_sum(count, report.world) for count in counts])


def check_broadcast(report: Report) -> None:
    for count in (1, 250_007):
        got = []
        for source in range(report.world):
            tensor = pattern(count, source) if source == report.rank else torch.full((count,), -1.0)
            dist.broadcast(tensor, src=source)
            got.append(tensor)
        report.check_tensors(f"broadcast x {count}", got, [pattern(count, source) for source in range(report.world)])


def check_gathers(report: Report) -> None:
    count = 50_021
    expected = [pattern(count, rank) for rank in range(report.world)]
    mine = pattern(count, report.rank)

    got = [torch.empty(count) for _ in range(report.world)]
    dist.all_gather(got, mine)
    report.check_tensors("all_gather", got, expected)

    together = torch.empty(report.world * count)
    dist.all_gather_single(together, mine)
    report.check_tensors("all_gather_single", [together], [torch.cat(expected)])

    last = report.world - 1
    got = [torch.empty(count) for _ in range(report.world)] if report.rank == last else None
    dist.gather(mine, got, dst=last)
    report.check_tensors("gather", got or [], expected if report.rank == last else [])

    piece = torch.empty(count)
    dist.scatter(piece, expected if report.rank == last else None, src=last)
    report.check_tensors("scatter", [piece], [mine])


def check_objects(report: Report) -> None:
    """Objects of different sizes by rank: their lengths travel first."""
    expected = [{"rank": rank, "text": "gloo" * 1000 * rank} for rank in range(report.world)]
    got = [None] * report.world
    dist.all_gather_object(got, expected[report.rank])
    report.check("all_gather_object", "" if got == expected else f"got {str(got)[:200]}")

    sent = ["text", 7, {"nested": [1.5, None]}]
    received = sent if report.rank == 0 else [None] * len(sent)
    dist.broadcast_object_list(received, src=0)
    report.check("broadcast_object_list", "" if received == sent else f"got {received}")


def check_reduce(report: Report) -> None:
    count = 10_007
    got, expected = [], []
    for target in range(report.world):
        tensor = pattern(count, report.rank)
        dist.reduce(tensor, dst=target)
        if target == report.rank:  # elsewhere its content is undefined
            got, expected = [tensor], [pattern_sum(count, report.world)]
    report.check_tensors("reduce", got, expected)


def check_reduce_scatter(report: Report) -> None:
    count = 10_007
    mine = list(pattern(count * report.world, report.rank).split(count))
    expected = pattern_sum(count * report.world, report.world).split(count)[report.rank]
    got = torch.empty(count)
    try:
        dist.reduce_scatter(got, mine)
        report.check_tensors("reduce_scatter", [got], [expected])
    except RuntimeError as error:
        report.not_in_gloo("reduce_scatter", error)
    got = torch.empty(count)
    try:
        dist.reduce_scatter_single(got, torch.cat(mine))
        report.check_tensors("reduce_scatter_single", [got], [expected])
    except RuntimeError as error:
        report.not_in_gloo("reduce_scatter_single", error)


def check_all_to_all(report: Report) -> None:
    count = 5_003
    mine = list(pattern(count * report.world, report.rank).split(count))
    expected = [pattern(count * report.world, rank).split(count)[report.rank] for rank in range(report.world)]
    together = torch.empty(count * report.world)
    try:
        dist.all_to_all_single(together, torch.cat(mine))
        report.check_tensors("all_to_all_single", [together], [torch.cat(expected)])
    except RuntimeError as error:
        report.not_in_gloo("all_to_all_single", error)
    got = [torch.empty(count) for _ in range(report.world)]
    try:
        dist.all_to_all(got, mine)
        report.check_tensors("all_to_all", got, expected)
    except RuntimeError as error:
        report.not_in_gloo("all_to_all", error)


def check_barrier(report: Report) -> None:
    """Nobody passes before rank 0 has come: their messages, sent after it, must not be there yet."""
    if report.rank != 0:
        dist.barrier()
        dist.send(torch.ones(1), dst=0)
        report.check("barrier", "")
        return
    passed = [torch.zeros(1) for _ in report.others]
    works = [dist.irecv(flag, src=other) for flag, other in zip(passed, report.others, strict=True)]
    time.sleep(0.2)  # long enough for a rank that does not wait to be caught; a right answer never depends on it
    early = sum(int(flag.item()) for flag in passed)
    dist.barrier()
    for work in works:
        work.wait()
    report.check("barrier", f"{early} ranks passed it before rank 0 had come" if early else "")


def check_send_recv(report: Report) -> None:
    """Every ordered pair of ranks in turn; then tags out of order, and a receiver that takes from anyone."""
    count = 250_007
    got = []
    for source in range(report.world):
        for target in range(report.world):
            if source == report.rank != target:
                dist.send(pattern(count, source), dst=target)
            if target == report.rank != source:
                got.append(torch.empty(count))
                dist.recv(got[-1], src=source)
    report.check_tensors("send and recv", got, [pattern(count, other) for other in report.others])

    left, right = (report.rank - 1) % report.world, (report.rank + 1) % report.world
    if not report.others:
        return
    works = [dist.isend(torch.full((3,), float(tag)), dst=right, tag=tag) for tag in (2, 1)]
    got = [torch.empty(3), torch.empty(3)]
    for tensor, tag in zip(got, (1, 2), strict=True):
        dist.recv(tensor, src=left, tag=tag)
    for work in works:
        work.wait()
    report.check_tensors("send and recv by tag", got, [torch.full((3,), 1.0), torch.full((3,), 2.0)])

    if report.rank != 0:
        dist.send(torch.tensor([float(report.rank)]), dst=0, tag=3)
        report.check("recv from any rank", "")
        return
    seen = []
    for _ in report.others:
        tensor = torch.empty(1)
        source = dist.recv(tensor, tag=3)
        seen.append((source, int(tensor.item())))
    expected = [(other, other) for other in report.others]
    report.check("recv from any rank", "" if sorted(seen) == expected else f"got {sorted(seen)}, expected {expected}")


def check_isend_irecv(report: Report) -> None:
    """Large messages in flight in both directions at once between every two ranks."""
    count = 1_000_003
    got = [torch.empty(count) for _ in report.others]
    mine = pattern(count, report.rank)
    works = [dist.isend(mine, dst=other) for other in report.others]
    works += [dist.irecv(tensor, src=other) for tensor, other in zip(got, report.others, strict=True)]
    for work in works:
        work.wait()
    report.check_tensors("isend and irecv, both ways", got, [pattern(count, other) for other in report.others])


def check_two_groups(report: Report, timeout: datetime.timedelta) -> None:
    """Two groups of all ranks, interleaved; even and odd ranks start them in opposite order."""
    groups = [dist.new_group(timeout=timeout), dist.new_group(timeout=timeout)]
    my_order = (1, 0) if report.rank % 2 else (0, 1)
    counts = [100_003, 1, 50_021, 7]
    tensors = [[pattern(count, report.rank) + which for count in counts] for which in (0, 1)]
    works = [
        dist.all_reduce(tensors[which][position], group=groups[which], async_op=True)
        for position in range(len(counts))
        for which in my_order
    ]
    for work in works:
        work.wait()
    expected = [pattern_sum(count, report.world) + which * report.world for which in (0, 1) for count in counts]
    report.check_tensors("two groups at once", tensors[0] + tensors[1], expected)
    for group in groups:
        dist.destroy_process_group(group)


def check_part_of_the_ranks(report: Report, timeout: datetime.timedelta) -> None:
    """A group of the even ranks and one of the odd ranks."""
    parts = [list(range(0, report.world, 2)), list(range(1, report.world, 2))]
    groups = [dist.new_group(part, timeout=timeout) for part in parts if part]
    mine = report.rank % 2
    tensor = pattern(1023, report.rank)
    dist.all_reduce(tensor, group=groups[mine])
    expected = sum(pattern(1023, rank) for rank in parts[mine])
    report.check_tensors("new_group of every other rank", [tensor], [expected])
    dist.barrier()  # a part must not be gone while the other is still at work
    dist.destroy_process_group(groups[mine])


def check_group_made_again(report: Report, timeout: datetime.timedelta) -> None:
    for time_made in ("made", "destroyed and made again"):
        group = dist.new_group(timeout=timeout)
        tensor = pattern(10_007, report.rank)
        dist.all_reduce(tensor, group=group)
        report.check_tensors(f"group {time_made}", [tensor], [pattern_sum(10_007, report.world)])
        dist.destroy_process_group(group)


def check_ddp(report: Report) -> None:
    """Five steps of DDP on each rank's part of a batch against the same steps on the whole batch in one process."""
    per_rank, width = 4, 64
    torch.manual_seed(0)
    inputs, targets = torch.randn(per_rank * report.world, width), torch.randn(per_rank * report.world, 1)
    mine = slice(report.rank * per_rank, (report.rank + 1) * per_rank)

    def model_after_training(part: slice, wrap: bool) -> nn.Module:
        # DDP itself must make the ranks agree: each starts from other weights, the reference from those of rank 0.
        torch.manual_seed(1 + (report.rank if wrap else 0))
        model = nn.Sequential(nn.Linear(width, 128), nn.Tanh(), nn.Linear(128, 128), nn.Tanh(), nn.Linear(128, 1))
        trained = DistributedDataParallel(model, bucket_cap_mb=0.02) if wrap else model  # small: several buckets
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for _ in range(5):
            optimizer.zero_grad()
            nn.functional.mse_loss(trained(inputs[part]), targets[part]).backward()
            optimizer.step()
        return model

    got = model_after_training(mine, wrap=True)
    expected = model_after_training(slice(None), wrap=False)
    pairs = zip(got.parameters(), expected.parameters(), strict=True)
    error = max((a - b).abs().max().item() for a, b in pairs)
    report.check("DDP", "" if error < 1e-5 else f"weights differ by {error} from one process on the whole batch")


if __name__ == "__main__":
    sys.exit(main())
