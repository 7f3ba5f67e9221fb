"""The flags that several commands share, and the words that they take."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

__all__ = [
    "AlsoFlag",
    "BackendFlag",
    "BackendName",
    "ColocatedFlag",
    "DebugFlag",
    "Destination",
    "DocumentKind",
    "DomainFlag",
    "DoubleBufferFlag",
    "ExtraFlag",
    "HtmlFlag",
    "IterationsFlag",
    "JoinFlag",
    "JsonFlag",
    "LinesFlag",
    "M2nFlag",
    "MetricsFlag",
    "ModeFlag",
    "ModeName",
    "ModelFlag",
    "OriginFlag",
    "RejoinFlag",
    "RoleFlag",
    "RoleName",
    "Source",
    "StagingFlag",
    "TargetFlag",
    "TimeoutFlag",
    "TokenFileFlag",
    "TokenFlag",
    "TrustFlag",
    "VerifyFlag",
    "WatchFlag",
]


class ModeName(StrEnum):
    """The modes of the command line."""

    broadcast = "broadcast"
    hybrid_ffn = "hybrid-ffn"
    reshard = "reshard"
    hybrid = "hybrid"


class BackendName(StrEnum):
    """The transports of the command line."""

    auto = "auto"
    nccl = "nccl"
    gloo = "gloo"


class RoleName(StrEnum):
    """The jobs that may join each other."""

    source = "source"
    destination = "destination"


class DocumentKind(StrEnum):
    """The kinds of documents that have a schema."""

    layout = "layout"
    model = "model"
    hardware = "hardware"


Source = Annotated[Path, typer.Argument(metavar="SOURCE", help="layout document of the source job")]
Destination = Annotated[
    Path, typer.Argument(metavar="DESTINATION", help="layout document of the destination job")
]
ModelFlag = Annotated[
    Path | None,
    typer.Option("--model", help="model document or checkpoint folder, over what the documents say"),
]
ModeFlag = Annotated[
    ModeName,
    typer.Option(
        "--mode",
        help="broadcast: every tensor whole. hybrid-ffn: FFN projections as fragments, the rest whole. "
        "reshard: every tensor as fragments. hybrid: each by its rule's route, else whichever is cheaper",
    ),
]
StagingFlag = Annotated[
    float, typer.Option("--staging", metavar="MIB", help="extra memory per rank, at most")
]


def _waitable(seconds: float) -> float:
    from reshard_cli.refit.prepare import check_timeout

    check_timeout(seconds, "--timeout")
    return seconds


TimeoutFlag = Annotated[
    float, typer.Option("--timeout", metavar="S", help="longest wait for a peer", callback=_waitable)
]
BackendFlag = Annotated[BackendName, typer.Option("--backend", help="auto: nccl where all have GPUs")]
DomainFlag = Annotated[
    str | None,
    typer.Option("--domain", metavar="N/auto", help="ranks per NVLink domain; auto: what the machine says"),
]
ColocatedFlag = Annotated[bool, typer.Option("--colocated", help="both jobs start at rank 0 and share GPUs")]
ExtraFlag = Annotated[bool, typer.Option("--allow-extra", help="leave out tensors that only the source has")]
TrustFlag = Annotated[
    bool,
    typer.Option(
        "--trust-checkpoint", help="read a DCP checkpoint's metadata (a pickle; read as data, never run)"
    ),
]
JsonFlag = Annotated[
    str | None, typer.Option("--json", metavar="FILE", help="write the report; - for standard output, alone")
]
HtmlFlag = Annotated[str | None, typer.Option("--html", metavar="FILE", help="write a page of pictures")]
DebugFlag = Annotated[bool, typer.Option("--debug", help="show the traceback of a failure")]
OriginFlag = Annotated[
    str,
    typer.Option(
        "--from", metavar="WHERE", help="a safetensors or DCP folder, live:module:function, or synthetic"
    ),
]
TargetFlag = Annotated[
    str,
    typer.Option(
        "--to",
        metavar="WHERE",
        help="a folder (one file per destination rank), live:module:function, or memory",
    ),
]
IterationsFlag = Annotated[
    int | None,
    typer.Option(
        "--iterations",
        min=1,
        help="refits in a row; default: 1, with --watch or as a joined destination no end",
    ),
]
WatchFlag = Annotated[
    Path | None,
    typer.Option("--watch", metavar="DIR", help="refit from each new complete checkpoint under DIR"),
]
DoubleBufferFlag = Annotated[
    bool,
    typer.Option("--double-buffer", help="keep the old version whole until the new one is, for its memory"),
]
JoinFlag = Annotated[
    str | None,
    typer.Option(
        "--join",
        metavar="HOST:PORT",
        help="join a job that is started by itself; the source's rank 0 listens there",
    ),
]
RoleFlag = Annotated[
    RoleName | None, typer.Option("--role", help="with --join: which of the two jobs this one is")
]
TokenFileFlag = Annotated[
    Path | None, typer.Option("--token-file", metavar="FILE", help="with --join: the secret of both jobs")
]
TokenFlag = Annotated[
    str | None,
    typer.Option("--token", metavar="TEXT", help="the same as text, which other users of this host may see"),
]
AlsoFlag = Annotated[
    list[Path] | None,
    typer.Option(
        "--also", metavar="DOCUMENT", help="with --role source: another destination layout to let in"
    ),
]
RejoinFlag = Annotated[
    bool,
    typer.Option("--rejoin", help="with --role source: go on without a job that fails; it may join again"),
]
M2nFlag = Annotated[
    bool,
    typer.Option(
        "--m2n",
        help="NCCL M2N (package nccl-extensions, backend nccl) carries the tensors that it can; never run on GPUs yet",
    ),
]
LinesFlag = Annotated[
    str | None,
    typer.Option("--lines", metavar="FILE", help="one JSON line per refit; - for standard output"),
]
MetricsFlag = Annotated[
    Path | None,
    typer.Option("--metrics", metavar="FILE", help="keep figures there as Prometheus reads them"),
]
VerifyFlag = Annotated[bool, typer.Option("--verify", help="compare every destination element")]
