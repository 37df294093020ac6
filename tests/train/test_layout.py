import copy

import pytest
import torch
from torch import nn

from hetdeploy.train import layout
from hetdeploy.train.allreduce import AllReduce
from hetdeploy.train.buckets import plan_buckets
from hetdeploy.train.errors import LayoutMismatch, MisuseError

from .ranks import outcomes, run


def model(width=3, dtype=torch.float32):
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(2, width), nn.BatchNorm1d(width), nn.Linear(width, 1)).to(dtype)


def with_another_parameter():
    changed = model()
    changed.register_parameter("extra", nn.Parameter(torch.zeros(1)))
    return changed


def frozen():
    changed = model()
    changed[0].weight.requires_grad_(False)
    return changed


@pytest.mark.parametrize(
    ("theirs", "named"),
    [
        (
            lambda: model(width=4),
            r"'parameter 0.weight \(3, 2\) float32' against 'parameter 0.weight \(4, 2\) float32'",
        ),
        (lambda: model(dtype=torch.bfloat16), r"float32' against 'parameter 0.weight \(3, 2\) bfloat16'"),
        (with_another_parameter, r"'parameter extra \(1,\) float32'"),
        (frozen, r"'parameter 0.weight \(3, 2\) float32 frozen'"),
        (lambda: nn.Sequential(*list(model())[:2]), r"'parameter 2.weight \(1, 3\) float32'"),
    ],
    ids=["shape", "dtype", "added parameter", "frozen", "fewer layers"],
)
@pytest.mark.parametrize("size", [2, 3])
def test_every_rank_is_told_the_same_first_difference(theirs, named, size):
    models = [model() for _ in range(size - 1)] + [theirs()]
    told = outcomes(size, lambda world: layout.compare(world.open("test"), layout.describe(models[world.rank], {})))
    assert all(isinstance(error, LayoutMismatch) for error in told), told
    assert len({str(error) for error in told}) == 1
    with pytest.raises(LayoutMismatch, match=f"rank 0 and rank {size - 1} differ: .*{named}"):
        raise told[0]


@pytest.mark.parametrize(
    ("argument", "values"), [("wire", ["bf16", "int8"]), ("align_every", [0, 5]), ("bucket_mb", [1e-5, 1])]
)
def test_arguments_are_part_of_the_layout(argument, values):
    told = outcomes(2, lambda world: AllReduce(model(), world=world, **{argument: values[world.rank]}))
    assert all(isinstance(error, LayoutMismatch) for error in told), told
    assert str(told[0]) == str(told[1])


def test_equal_models_pass():
    assert run(2, lambda world: layout.compare(world.open("test"), layout.describe(model(), {"a": 1}))) == [None, None]


def test_weights_and_buffers_become_rank_0s_bits_whatever_their_dtype():
    models = [model(), model()]
    with torch.no_grad():
        models[1][0].weight.add_(1e-7)
        models[1][1].running_mean.fill_(3.0)
        models[1][1].num_batches_tracked.fill_(7)
    before = copy.deepcopy(models[0].state_dict())
    changed = run(2, lambda world: layout.align(world.open("test"), models[world.rank]))
    assert changed == [True, True]
    for each in models:
        assert all(torch.equal(value, before[name]) for name, value in each.state_dict().items())
    assert run(2, lambda world: layout.align(world.open("test"), models[world.rank])) == [False, False]


def test_one_flipped_bit_changes_the_digest():
    tensor = torch.zeros(1000)
    before = layout.state_digest([tensor])
    tensor.view(torch.int32)[500] ^= 1
    assert layout.state_digest([tensor]) != before


@pytest.mark.parametrize("bucket_bytes", [0, 1, 12, 13, 64, 1 << 20])
def test_every_trainable_parameter_is_in_one_bucket_once(bucket_bytes):
    shared = model()
    shared.tied = shared[0]
    shared[2].bias.requires_grad_(False)
    buckets = plan_buckets(shared, bucket_bytes)
    planned = [name for bucket in buckets for name in bucket.names]
    assert sorted(planned) == ["0.bias", "0.weight", "1.bias", "1.weight", "2.weight"]
    assert all(bucket.numel * 4 <= bucket_bytes or len(bucket.names) == 1 for bucket in buckets)
    assert [bucket.index for bucket in buckets] == list(range(len(buckets)))


def test_a_position_names_its_parameter():
    (bucket,) = plan_buckets(model(), 1 << 20)
    assert [bucket.name_at(position) for position in (0, 1, 3, 4)] == ["2.bias", "2.weight", "2.weight", "1.bias"]


def test_a_model_without_trainable_parameters_is_refused():
    with pytest.raises(MisuseError, match="no trainable parameter"):
        AllReduce(nn.ReLU())
