"""DDP needs the default process group, of which a process has one: two real processes, started once."""

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing
from torch import nn
from torch.nn import functional

from hetdeploy.train.ddp import WeightedDDP
from hetdeploy.train.errors import LayoutMismatch, MisuseError, NonFiniteGradient

SHARES = [6, 2]
DATA = torch.Generator().manual_seed(0)
X, Y = torch.randn(sum(SHARES), 4, generator=DATA), torch.randn(sum(SHARES), 1, generator=DATA)


def model():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))


def loss_sum(net, x, y):
    return functional.mse_loss(net(x), y, reduction="sum")


def rank_main(rank, folder):
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=2)
    try:
        torch.save(told(rank), f"{folder}/{rank}.pt")
        dist.barrier()
    finally:
        dist.destroy_process_group()


def told(rank):
    answers = {}
    net = model()
    sync = WeightedDDP(net)
    x, y = X.split(SHARES)[rank], Y.split(SHARES)[rank]
    with sync.no_sync():
        first = loss_sum(sync, x[:1], y[:1])
        first.backward()
    loss = loss_sum(sync, x[1:], y[1:])
    loss.backward()
    record = sync.reduce(samples=len(x), loss=first.detach() + loss.detach())
    answers["loss"] = record.loss
    answers["gradient"] = [parameter.grad.clone() for parameter in net.parameters()]
    net.zero_grad()
    (loss_sum(sync, x, y) * (float("nan") if rank == 1 else 1.0)).backward()
    try:
        sync.reduce(samples=len(x))
    except NonFiniteGradient as error:
        answers["nan"] = str(error)
    answers["dropped"] = all(parameter.grad is None for parameter in net.parameters())
    try:
        WeightedDDP(nn.Linear(4, 8 + rank))
    except LayoutMismatch as error:
        answers["mismatch"] = str(error)
    return answers


@pytest.fixture(scope="module")
def answers(tmp_path_factory):
    folder = tmp_path_factory.mktemp("ddp")
    torch.multiprocessing.spawn(rank_main, args=(folder,), nprocs=2)
    return [torch.load(folder / f"{rank}.pt", weights_only=True) for rank in range(2)]


def test_uneven_batches_give_the_gradient_of_the_union_batch(answers):
    net = model()
    loss = loss_sum(net, X, Y) / len(X)
    loss.backward()
    for answer in answers:
        assert answer["loss"] == pytest.approx(loss.item(), rel=1e-5)
        for gradient, parameter in zip(answer["gradient"], net.parameters(), strict=True):
            torch.testing.assert_close(gradient, parameter.grad)


def test_nan_on_one_rank_is_named_on_both_and_dropped(answers):
    assert answers[0]["nan"] == answers[1]["nan"]
    assert "is NaN or Inf on rank 1 at step 1" in answers[0]["nan"]
    assert answers[0]["dropped"]
    assert answers[1]["dropped"]


def test_models_that_differ_are_an_error_on_both(answers):
    assert "'parameter weight (8, 4) float32' against 'parameter weight (9, 4) float32'" in answers[0]["mismatch"]
    assert answers[0]["mismatch"] == answers[1]["mismatch"]


def test_without_a_process_group_it_says_what_to_use():
    with pytest.raises(MisuseError, match="or use AllReduce"):
        WeightedDDP(model())
