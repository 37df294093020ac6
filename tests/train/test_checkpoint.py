import copy
import hashlib
import logging
import random
import resource
import signal
import subprocess
import sys
import textwrap
from pathlib import Path

import numpy
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.utils.data import DataLoader

from hetdeploy.train.allreduce import AllReduce
from hetdeploy.train.checkpoint import CheckpointError, Checkpoints
from hetdeploy.train.data import Batches, ShareSampler, TokenBlocks, collate
from hetdeploy.train.diloco import DiLoCo
from hetdeploy.train.errors import MisuseError
from hetdeploy.train.portable import portable
from hetdeploy.train.world import World

from .ranks import outcomes, run


class Numbers:
    """The smallest part."""

    def __init__(self, value=None):
        self.value = value

    def state_dict(self):
        return {"value": self.value}

    def load_state_dict(self, state):
        self.value = state["value"]


def solo(folder, keep=3):
    return Checkpoints(folder, keep=keep, world=World.solo())


def model(width=8):
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, width), nn.BatchNorm1d(width), nn.Dropout(0.5), nn.Linear(width, 1))


def names(folder):
    return sorted(path.name.partition(".")[0] for path in folder.glob("step-*.pt"))


def flip_a_byte(path, at=-1000):
    content = bytearray(path.read_bytes())
    content[at] ^= 1
    path.write_bytes(content)


# --- resuming ---


class Run:
    """A training of its own in one process: everything that a checkpoint has to bring back is in use."""

    tokens = torch.arange(400) * 7 % 251

    def __init__(self, folder):
        torch.manual_seed(1)
        random.seed(1)
        numpy.random.seed(1)
        self.model = nn.Sequential(nn.Embedding(256, 8), nn.Flatten(), nn.Dropout(0.3), nn.Linear(64, 256))
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-2)
        self.schedule = torch.optim.lr_scheduler.CosineAnnealingLR(self.optimizer, 20)
        self.scaler = torch.amp.GradScaler("cpu", init_scale=8.0, growth_interval=3)
        self.batches = Batches(len(TokenBlocks(self.tokens, 8)), 7, seed=5)
        self.checkpoints = solo(folder)
        self.shared = {
            "model": self.model,
            "optimizer": self.optimizer,
            "schedule": self.schedule,
            "scaler": self.scaler,
            "batches": self.batches,
        }
        self.start = self.checkpoints.load(self.shared)

    def train(self, stop, save_at=()):
        sampler = ShareSampler(self.batches, 0, [1], start=self.start, stop=stop)
        blocks = TokenBlocks(self.tokens, 8)
        loader = DataLoader(blocks, batch_sampler=sampler, collate_fn=collate, generator=torch.Generator())
        losses = []
        for step, (inputs, targets) in enumerate(loader, self.start):
            noise = random.random() + numpy.random.random()
            self.optimizer.zero_grad()
            loss = nn.functional.cross_entropy(self.model(inputs), targets[:, -1]) * (1 + noise)
            self.scaler.scale(loss).backward()
            self.scaler.step(self.optimizer)
            self.scaler.update()
            self.schedule.step()
            losses.append(loss.item())
            if step + 1 in save_at:
                self.checkpoints.save(step + 1, self.shared)
        return losses


def test_a_resumed_run_is_the_same_bit_for_bit(tmp_path):
    whole = Run(tmp_path / "whole")
    losses = whole.train(20)
    first = Run(tmp_path / "resumed").train(9, save_at=(4, 9))
    resumed = Run(tmp_path / "resumed")
    assert resumed.start == 9
    assert first + resumed.train(20) == losses
    for mine, theirs in zip(whole.model.parameters(), resumed.model.parameters(), strict=True):
        assert torch.equal(mine, theirs)


@pytest.mark.parametrize("folders", ["one disk", "a disk each"])
def test_ranks_resume_bit_for_bit_with_their_own_error_feedback(tmp_path, folders):
    inputs, targets = torch.randn(24, 4), torch.randn(24, 1)

    def training(folder, start_at, stop):
        def body(world):
            own_model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))
            torch.nn.utils.vector_to_parameters(torch.linspace(-1, 1, 49), own_model.parameters())
            optimizer = torch.optim.AdamW(own_model.parameters(), lr=1e-2)
            exchange = AllReduce(own_model, wire="int8", world=world)
            place = folder if folders == "one disk" else folder / str(world.rank)
            checkpoints = Checkpoints(place, world=world)
            shared, own = {"model": own_model, "optimizer": optimizer}, {"exchange": exchange}
            start = checkpoints.load(shared, own)
            assert start == start_at
            for step in range(start, stop):
                mine = slice(4 * step + 2 * world.rank, 4 * step + 2 * world.rank + 1 + world.rank)
                optimizer.zero_grad()
                loss = nn.functional.mse_loss(own_model(inputs[mine]), targets[mine], reduction="sum")
                loss.backward()
                exchange.reduce(1 + world.rank, loss)
                optimizer.step()
            checkpoints.save(stop, shared, own)
            exchange.close()
            return [parameter.detach().clone() for parameter in own_model.parameters()]

        return run(2, body)

    whole = training(tmp_path / "whole", 0, 6)
    training(tmp_path / "resumed", 0, 3)
    resumed = training(tmp_path / "resumed", 3, 6)
    for rank in range(2):
        assert all(torch.equal(a, b) for a, b in zip(whole[rank], resumed[rank], strict=True))


def test_diloco_goes_on_from_its_outer_state(tmp_path):
    def rounds(start_from, count):
        own_model = nn.Linear(3, 2)
        nn.init.constant_(own_model.weight, 0.5)
        nn.init.zeros_(own_model.bias)
        outer = DiLoCo(own_model, every=2, overlap=False, world=World.solo())
        shared = {"model": own_model, "outer": outer}
        checkpoints = solo(tmp_path / start_from)
        start = checkpoints.load(shared)
        optimizer = torch.optim.SGD(own_model.parameters(), lr=0.1)
        for step in range(start, start + count):
            optimizer.zero_grad()
            own_model(torch.full((1, 3), float(step))).square().sum().mul(1e-3).backward()
            optimizer.step()
            outer.step(1)
        checkpoints.save(start + count, shared)
        outer.close()
        return own_model

    whole = rounds("whole", 8)
    rounds("resumed", 4)
    assert torch.equal(whole.weight, rounds("resumed", 4).weight)


def test_a_new_machine_takes_what_rank_0_has(tmp_path, caplog):
    def body(world, weights):
        checkpoints = Checkpoints(tmp_path / str(world.rank), world=world)
        shared, own = Numbers(weights[world.rank]), Numbers(world.rank)
        start = checkpoints.load({"weights": shared}, {"feedback": own})
        if start == 0:
            checkpoints.save(7, {"weights": shared}, {"feedback": own})
        return start, shared.value, own.value

    run(2, lambda world: body(world, [torch.ones(3), torch.zeros(3)]))
    for path in (tmp_path / "1").iterdir():
        path.unlink()
    with caplog.at_level(logging.WARNING):
        after = run(2, lambda world: body(world, [None, None]))
    assert [start for start, _, _ in after] == [7, 7]
    assert all(torch.equal(weights, torch.ones(3)) for _, weights, _ in after)
    assert [own for _, _, own in after] == [0, 0]
    assert "rank 1 has no file of its own for step 7" in caplog.text


def test_what_other_ranks_have_of_another_run_does_not_count(tmp_path):
    def body(world):
        checkpoints = Checkpoints(tmp_path / str(world.rank), world=world)
        start = checkpoints.load({"weights": Numbers()}, {"feedback": Numbers()})
        checkpoints.save(5, {"weights": Numbers(1)}, {"feedback": Numbers(2)})
        return start

    run(2, body)
    for path in (tmp_path / "0").iterdir():
        path.unlink()
    assert run(2, body) == [0, 0]
    assert names(tmp_path / "1") == ["step-00000005"]


def test_a_rank_that_cannot_load_stops_all_ranks_with_its_reason(tmp_path):
    def body(world):
        shared = {"model": model(8 if world.size == 1 or world.rank == 0 else 9)}
        return Checkpoints(tmp_path, world=world).load(shared)

    solo(tmp_path).save(3, {"model": model()})
    for told in outcomes(2, body):
        assert isinstance(told, CheckpointError)
        assert "rank 1 cannot load the checkpoint" in str(told)
        assert "'0.weight (8, 4) float32' against '0.weight (9, 4) float32'" in str(told)


# --- damage ---


DAMAGES = {
    "a bit has flipped": flip_a_byte,
    "cut off": lambda path: path.write_bytes(path.read_bytes()[:-500]),
    "empty": lambda path: path.write_bytes(b""),
    "zeros": lambda path: path.write_bytes(bytes(path.stat().st_size)),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_newest_file_falls_back_to_the_one_before_loudly(tmp_path, caplog, damage):
    checkpoints = solo(tmp_path)
    checkpoints.save(1, {"part": Numbers(torch.zeros(9))})
    checkpoints.save(2, {"part": Numbers(torch.ones(9))})
    newest = checkpoints.save(3, {"part": Numbers(torch.full((9,), 2.0))})
    DAMAGES[damage](newest)

    part = Numbers()
    assert solo(tmp_path).load({"part": part}) == 2
    assert torch.equal(part.value, torch.ones(9))
    [record] = [record for record in caplog.records if record.levelno == logging.ERROR]
    assert f"checkpoint {newest} is damaged" in record.getMessage()
    assert newest.with_name(newest.name + ".damaged").exists()
    solo(tmp_path).save(3, {"part": part})  # its step is done again


@given(st.integers(0, 2**30))
def test_no_flipped_bit_goes_unnoticed(tmp_path_factory, where):
    folder = tmp_path_factory.mktemp("flip")
    path = solo(folder).save(1, {"part": Numbers(torch.arange(50))})
    flip_a_byte(path, where % path.stat().st_size)
    with pytest.raises(CheckpointError, match=r"no checkpoint in .* is sound"):
        solo(folder).load({"part": Numbers()})


def test_all_damaged_is_an_error_and_not_a_fresh_start(tmp_path):
    for step in (1, 2):
        flip_a_byte(solo(tmp_path).save(step, {"part": Numbers(1)}))
    for _ in range(2):  # also the next time, when the files have been set aside
        with pytest.raises(CheckpointError, match="use a new folder to start from the beginning"):
            solo(tmp_path).load({"part": Numbers()})


def test_all_damaged_at_rank_0_stops_all_ranks(tmp_path):
    flip_a_byte(solo(tmp_path).save(1, {"part": Numbers(1)}))
    for told in outcomes(2, lambda world: Checkpoints(tmp_path, world=world).load({"part": Numbers()})):
        assert isinstance(told, CheckpointError)
        assert "rank 0 cannot load the checkpoint: no checkpoint in" in str(told)


def test_a_process_killed_while_it_writes_leaves_only_sound_files(tmp_path):
    script = textwrap.dedent(
        """
        import itertools, sys, torch
        from hetdeploy.train.checkpoint import Checkpoints
        class Part:
            def state_dict(self): return {"value": torch.ones(2_000_000)}
            def load_state_dict(self, state): pass
        checkpoints = Checkpoints(sys.argv[1], keep=2)
        for step in itertools.count(1):
            checkpoints.save(step, {"part": Part()})
            print(step, flush=True)
        """
    )
    with subprocess.Popen([sys.executable, "-c", script, str(tmp_path)], stdout=subprocess.PIPE, text=True) as writer:
        done = [int(writer.stdout.readline()) for _ in range(4)][-1]
        while not list(tmp_path.glob(".*.unfinished")):  # in the middle of the next one
            assert writer.poll() is None
        writer.send_signal(signal.SIGKILL)
    part = Numbers()
    assert solo(tmp_path).load({"part": part}) >= done
    assert torch.equal(part.value, torch.ones(2_000_000))
    solo(tmp_path).save(10**6, {"part": part})
    assert not list(tmp_path.glob(".*.unfinished"))


# --- no room ---


def test_no_room_is_one_clear_error_and_earlier_checkpoints_are_intact(tmp_path):
    solo(tmp_path).save(1, {"part": Numbers(torch.ones(10))})
    before = {path: path.read_bytes() for path in tmp_path.iterdir()}
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, hard))
    try:
        with pytest.raises(CheckpointError) as caught:
            solo(tmp_path).save(2, {"part": Numbers(torch.ones(1 << 20))})
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert str(caught.value) == (
        f"the checkpoint of step 2 could not be written to {tmp_path}: File too large: "
        "make room or use another folder; earlier checkpoints are intact"
    )
    assert {path: path.read_bytes() for path in tmp_path.iterdir()} == before


@pytest.mark.lan
@pytest.mark.parametrize("floats", [1 << 17, (1 << 18) - 2000, 1 << 20])
def test_a_full_disk_is_named(tmp_path, floats):
    """A real one of 1.5 MiB, on which the first checkpoint takes 1 MiB."""
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1536k", "tmpfs", tmp_path], check=True)
    try:
        solo(tmp_path).save(1, {"part": Numbers(torch.ones(1 << 18))})
        with pytest.raises(CheckpointError, match="No space left on device"):
            solo(tmp_path).save(2, {"part": Numbers(torch.ones(floats))})
        part = Numbers()
        assert solo(tmp_path).load({"part": part}) == 1
        assert torch.equal(part.value, torch.ones(1 << 18))
    finally:
        subprocess.run(["umount", tmp_path], check=True)


def test_a_folder_that_cannot_be_is_named(tmp_path):
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(CheckpointError, match=r"could not be written to .*file/below: Not a directory"):
        solo(tmp_path / "file" / "below").save(1, {"part": Numbers(1)})


# --- which are kept ---


@given(st.integers(1, 4), st.lists(st.integers(0, 99), min_size=1, max_size=8, unique=True))
def test_the_last_ones_are_kept(tmp_path_factory, keep, steps):
    folder = tmp_path_factory.mktemp("keep")
    (folder / "notes.txt").write_text("not a checkpoint")
    (folder / "step-00000001.pt").write_text("not one of these either")
    for step in sorted(steps):
        solo(folder, keep).save(step, {"part": Numbers(step)})
    kept = sorted(steps)[-keep:]
    assert names(folder) == sorted(["step-00000001", *(f"step-{step:08d}" for step in kept)])
    part = Numbers()
    assert solo(folder).load({"part": part}) == part.value == kept[-1]


def test_the_same_step_again_takes_the_place_of_the_first(tmp_path):
    for value in (1, 2):
        solo(tmp_path).save(5, {"part": Numbers(value)})
    assert len(list(tmp_path.iterdir())) == 1
    part = Numbers()
    solo(tmp_path).load({"part": part})
    assert part.value == 2


def test_a_fresh_run_does_not_write_among_later_steps_of_another(tmp_path):
    solo(tmp_path).save(500, {"part": Numbers(1)})
    with pytest.raises(MisuseError, match="already holds step 500, so step 10 cannot be saved there: load that one"):
        solo(tmp_path).save(10, {"part": Numbers(1)})


# --- what fits and what does not ---


@pytest.mark.parametrize(
    ("parts", "message"),
    [
        (lambda: {"model": model(9)}, "'0.weight (8, 4) float32' against '0.weight (9, 4) float32'"),
        (lambda: {"model": model().double()}, "'0.weight (8, 4) float32' against '0.weight (8, 4) float64'"),
        (lambda: {"model": model()[:3]}, "'3.weight (1, 8) float32' is on one of them only"),
        (
            lambda: {"model": (m := model()), "optimizer": torch.optim.Adam(m[0].parameters())},
            "is of another optimizer: 'group 0: 6 parameters",
        ),
        (
            lambda: {"model": (m := model()), "optimizer": torch.optim.SGD(m.parameters())},
            "is of another optimizer: 'group 0: 6 parameters, amsgrad, betas",
        ),
        (lambda: {"model": model(), "scaler": Numbers()}, "has no shared part 'scaler', it has ['model', 'optimizer']"),
    ],
)
def test_a_checkpoint_of_something_else_is_refused_by_its_first_difference(tmp_path, parts, message):
    trained = model()
    solo(tmp_path).save(3, {"model": trained, "optimizer": torch.optim.Adam(trained.parameters())})
    fresh = parts()
    untouched = copy.deepcopy(fresh["model"].state_dict())
    with pytest.raises(CheckpointError) as caught:
        solo(tmp_path).load(fresh)
    assert message in str(caught.value)
    for name, value in fresh["model"].state_dict().items():
        assert torch.equal(value, untouched[name])


def test_less_may_be_loaded_than_was_saved(tmp_path):
    trained = model()
    nn.init.ones_(trained[0].weight)
    solo(tmp_path).save(3, {"model": trained, "optimizer": torch.optim.Adam(trained.parameters())})
    fresh = model()
    assert solo(tmp_path).load({"model": fresh}) == 3
    assert torch.equal(fresh[0].weight, trained[0].weight)


def test_there_is_nothing_to_load(tmp_path):
    assert solo(tmp_path / "new").load({"part": Numbers()}) == 0
    with pytest.raises(MisuseError, match="keep=0"):
        solo(tmp_path, keep=0)


def test_a_file_of_another_format_is_refused(tmp_path):
    path = solo(tmp_path).save(1, {"part": Numbers(1)})
    content = torch.load(path, weights_only=True)
    other = tmp_path / "other"
    torch.save(content | {"format": 99}, other)
    path.unlink()
    other.rename(tmp_path / f"step-00000001.rank0.{hashlib.sha256(other.read_bytes()).hexdigest()[:16]}.pt")
    with pytest.raises(CheckpointError, match="has format 99, this version reads 1"):
        solo(tmp_path).load({"part": Numbers()})


def test_a_file_opens_anywhere_with_weights_only(tmp_path):
    trained = model()
    optimizer = torch.optim.AdamW(trained.parameters())
    trained(torch.ones(4, 4)).sum().backward()
    optimizer.step()
    path = solo(tmp_path).save(1, {"model": trained, "optimizer": optimizer}, {"own": Numbers((1, "a", None))})
    content = torch.load(path, weights_only=True)
    assert torch.equal(content["shared"]["model"]["0.weight"], trained[0].weight)
    assert content["own"]["own"]["value"] == (1, "a", None)


def test_only_what_is_seen_of_a_tensor_is_written(tmp_path):
    """A small view of a large buffer must not bring the buffer along."""
    path = solo(tmp_path).save(1, {"part": Numbers(torch.ones(1_000_000)[:10])})
    assert path.stat().st_size < 100_000


def test_numbers_of_numpy_become_numbers():
    assert type(portable(numpy.float64(1.5), "x")) is float
    assert portable(numpy.float64(1.5), "x") == 1.5


@pytest.mark.parametrize("value", [numpy.zeros(3), numpy.int64(3), {1, 2}, b"", object(), lambda: 0, Path("x")])
def test_what_weights_only_would_not_open_is_refused_when_it_is_saved(tmp_path, value):
    with pytest.raises(MisuseError, match=r"part\.value\.inner\[0\] is a .*, which a checkpoint cannot hold"):
        solo(tmp_path).save(1, {"part": Numbers({"inner": [value]})})
    assert not list(tmp_path.iterdir())


plain = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=5),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.tuples(inner, inner)
        | st.dictionaries(st.text(max_size=3) | st.integers(), inner, max_size=3)
    ),
    max_leaves=10,
)


@given(plain)
def test_all_plain_values_come_back_as_they_were(tmp_path_factory, value):
    folder = tmp_path_factory.mktemp("plain")
    solo(folder).save(1, {"part": Numbers(value)})
    part = Numbers()
    solo(folder).load({"part": part})
    assert part.value == value
    assert repr(part.value) == repr(value)
