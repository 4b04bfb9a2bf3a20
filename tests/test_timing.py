"""Paired timing of the benchmarks: what one call leaves behind does not slow the next."""

import weakref
from dataclasses import dataclass

import pytest

from benchmarks.timing import Contender, Effort, interleave, shortened


class Rows:
    """An argument that refers to itself, as buffers do."""

    def __init__(self):
        self.itself = self


def test_arguments_of_earlier_calls_are_freed_before_the_next():
    made, alive = [], []

    def setup():
        alive.append(sum(ref() is not None for ref in made))
        rows = Rows()
        made.append(weakref.ref(rows))
        return rows

    contender = Contender(lambda rows: None, setup)
    seconds = interleave({"ours": contender, "peer": contender}, Effort(0, least=2, warmup=1))
    assert [len(each) for each in seconds.values()] == [2, 2]
    assert alive == [0] * 6


def test_objects_are_collected_again_after_a_call_that_raises():
    def fail(_):
        raise RuntimeError("stop")

    with pytest.raises(RuntimeError, match="stop"):
        interleave({"ours": Contender(fail)}, Effort(0, least=1, warmup=0))
    rows = weakref.ref(Rows())
    interleave({"ours": Contender(lambda _: None)}, Effort(0, least=1, warmup=0))
    assert rows() is None


@dataclass(frozen=True)
class Scale:
    rows: int
    effort: Effort


def test_a_scale_is_shortened_by_its_times_alone():
    scale = Scale(7, Effort(seconds=4.0, least=3, most=9))
    assert shortened(scale, 0.25) == Scale(7, Effort(seconds=1.0, least=3, most=9))
    assert shortened(scale, 1.0) == scale
