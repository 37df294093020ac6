"""What counts as progress in a script's own output."""

import pytest

from hetdeploy.nodes.progress import describe, parse


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("step 10 loss 2.3456 samples/s 123.4", {"step": 10, "loss": 2.3456, "samples_per_second": 123.4}),
        ("epoch 1 step=7, loss=1e-3", {"step": 7, "loss": 0.001}),
        ("step: 3 Loss: nan", {"step": 3, "loss": pytest.approx(float("nan"), nan_ok=True)}),
        ("step 4", {"step": 4}),
        ("loss 2.0", None),
        ("a stepladder 3", None),
        ("", None),
    ],
)
def test_parse(line: str, expected: object) -> None:
    assert parse(line) == expected


def test_describe_shows_what_there_is() -> None:
    assert describe({"step": 4}) == "step 4"
    assert describe({"step": 4, "loss": 1.5, "samples_per_second": 12.34}) == "step 4  loss 1.5000  12.3 samples/s"
