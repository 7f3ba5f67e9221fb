"""What is asked of torch.cuda for the order of copies, and that the CPU has nothing to order."""

from __future__ import annotations

import contextlib

import torch

from reshard_cli.weights.streams import CudaStreams, HostStreams, streams_of


class Cuda:
    """Stands in for torch.cuda and writes down the order that is asked for."""

    def __init__(self):
        self.calls = []
        self.made = 0
        self.current = "caller"
        cuda = self

        class Stream:
            def __init__(self, device):
                self.name = ("pack", "unpack")[cuda.made]
                cuda.made += 1

            def wait_stream(self, other):
                cuda.calls.append((self.name, "after all of", other))

            def wait_event(self, event):
                assert event.at is not None, "an event that nothing recorded orders nothing"
                cuda.calls.append((self.name, "after", event.at))

            def synchronize(self):
                cuda.calls.append(("host", "after all of", self.name))

        class Event:
            at = None

            def record(self, stream):
                self.at = f"{stream}:{len(cuda.calls)}"

            def synchronize(self):
                cuda.calls.append(("host", "after", self.at))

        self.Stream, self.Event = Stream, Event

    def current_stream(self, device):
        return self.current

    @contextlib.contextmanager
    def stream(self, stream):
        before, self.current = self.current, stream.name
        yield
        self.current = before


def test_packing_and_unpacking_have_streams_of_their_own_ordered_by_events():
    cuda = Cuda()
    streams = CudaStreams(torch.device("cuda", 0), cuda)
    streams.begin()
    with streams.packing():
        assert cuda.current == "pack"
        packed = streams.mark()
    with streams.unpacking(after=packed):
        assert cuda.current == "unpack"
        unpacked = streams.mark()
    with streams.packing(after=unpacked):
        pass
    unpacked.wait()
    streams.end()
    assert cuda.current == "caller"
    assert cuda.calls == [
        ("pack", "after all of", "caller"),
        ("unpack", "after all of", "caller"),
        ("unpack", "after", "pack:2"),
        ("pack", "after", "unpack:3"),
        ("host", "after", "unpack:3"),
        ("host", "after all of", "pack"),
        ("host", "after all of", "unpack"),
    ]


def test_on_the_cpu_there_is_nothing_to_order():
    streams = streams_of(torch.device("cpu"))
    assert isinstance(streams, HostStreams)
    streams.begin()
    with streams.packing(), streams.unpacking(after=streams.mark()):
        streams.mark().wait()
    streams.end()
