"""Pickles are read as data: members of enumerations are names, and nothing is looked up, called or built."""

from __future__ import annotations

import enum
import pickle

import pytest

from reshard_cli.spec.pickled import Made, read_pickle


class Colour(enum.Enum):
    RED = 7


class Looked:
    """Is pickled as an attribute of something."""

    def __init__(self, of, *names):
        self.of, self.names = of, names

    def __reduce__(self):
        return getattr, (self.of, *self.names)


@pytest.mark.parametrize("protocol", [2, 3, 4, 5])
def test_a_member_is_its_class_and_its_name(protocol):
    name = f"{__name__}.Colour"
    assert read_pickle(pickle.dumps(Looked(Colour, "RED"), protocol), {name}) == Made(name, ("RED",))


@pytest.mark.parametrize(
    "looked", [Looked("text", "upper"), Looked(Colour, 7), Looked(Colour), Looked(Colour, "RED", None)]
)
def test_an_attribute_of_anything_else_is_refused(looked):
    with pytest.raises(ValueError, match="was not run"):
        read_pickle(pickle.dumps(looked), {f"{__name__}.Colour"})


def test_a_class_that_is_not_named_is_refused_behind_it_too():
    with pytest.raises(ValueError, match="Colour"):
        read_pickle(pickle.dumps(Looked(Colour, "RED")), {"torch.Size"})


def test_what_is_looked_up_is_not_called():
    data = pickle.dumps((Looked(Colour, "mro"), 1))
    found = read_pickle(data, {f"{__name__}.Colour"})
    assert found == (Made(f"{__name__}.Colour", ("mro",)), 1)
    with pytest.raises(ValueError, match="calls what has no name"):
        # calling what was looked up: REDUCE on the record
        read_pickle(pickle.dumps(Looked(Colour, "mro"), 2)[:-1] + b")R.", {f"{__name__}.Colour"})
