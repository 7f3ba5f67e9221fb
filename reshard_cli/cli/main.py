"""The command `reshard-cli` and its flags. Failures become one message and an exit code here."""

from __future__ import annotations

import os
import sys
import traceback
from pathlib import Path
from typing import Annotated

import typer

from reshard_cli import __version__
from reshard_cli.cli.flags import (
    AlsoFlag,
    BackendFlag,
    BackendName,
    ColocatedFlag,
    DebugFlag,
    Destination,
    DocumentKind,
    DomainFlag,
    DoubleBufferFlag,
    ExtraFlag,
    HtmlFlag,
    IterationsFlag,
    JoinFlag,
    JsonFlag,
    LinesFlag,
    M2nFlag,
    MetricsFlag,
    ModeFlag,
    ModelFlag,
    ModeName,
    OriginFlag,
    RejoinFlag,
    RoleFlag,
    RoleName,
    Source,
    StagingFlag,
    TargetFlag,
    TimeoutFlag,
    TokenFileFlag,
    TokenFlag,
    TrustFlag,
    VerifyFlag,
    WatchFlag,
)
from reshard_cli.errors import DocumentError, ReshardError

__all__ = ["app", "main"]

app = typer.Typer(
    add_completion=False,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    help="Give inference jobs their new weights: exact, close to the network's limit, never hanging.",
)


@app.command()
def plan(
    source: Source,
    destination: Destination,
    model: ModelFlag = None,
    mode: ModeFlag = ModeName.hybrid,
    staging: StagingFlag = 512,
    domain: DomainFlag = None,
    colocated: ColocatedFlag = False,
    allow_extra: ExtraFlag = False,
    trust_checkpoint: TrustFlag = False,
    m2n: M2nFlag = False,
    tensor: Annotated[
        str | None, typer.Option("--tensor", metavar="NAME", help="tell who holds and who sends this tensor")
    ] = None,
    tensors: Annotated[
        str | None, typer.Option("--tensors", metavar="GLOB", help="list the tensors of these names instead")
    ] = None,
    hardware: Annotated[
        str | None,
        typer.Option(
            "--hardware",
            metavar="NAME/FILE",
            help="what predictions are for: dgx-h100, gb200-nvl72, a profile's file, or cpu: measured here "
            "and now; default: by the size of the domains",
        ),
    ] = None,
    json: JsonFlag = None,
    html: HtmlFlag = None,
    debug: DebugFlag = False,
) -> None:
    """Show what a refit would move, without running it: no GPU, no ranks, no torch."""
    from reshard_cli.cli.plan import run_plan

    run_plan(
        source, destination, model=model, mode=mode.value, staging=_bytes_of(staging), domain=domain,
        colocated=colocated, allow_extra=allow_extra, hardware=hardware, json_file=json, html_file=html,
        tensor=tensor, tensors=tensors, trust=trust_checkpoint, m2n=m2n,
    )  # fmt: skip


@app.command()
def refit(
    source: Source,
    destination: Destination,
    origin: OriginFlag = "synthetic",
    target: TargetFlag = "memory",
    model: ModelFlag = None,
    mode: ModeFlag = ModeName.hybrid,
    iterations: IterationsFlag = None,
    watch: WatchFlag = None,
    verify: VerifyFlag = False,
    staging: StagingFlag = 512,
    timeout: TimeoutFlag = 120,
    backend: BackendFlag = BackendName.auto,
    domain: DomainFlag = None,
    colocated: ColocatedFlag = False,
    allow_extra: ExtraFlag = False,
    trust_checkpoint: TrustFlag = False,
    m2n: M2nFlag = False,
    double_buffer: DoubleBufferFlag = False,
    join: JoinFlag = None,
    role: RoleFlag = None,
    token_file: TokenFileFlag = None,
    token: TokenFlag = None,
    also: AlsoFlag = None,
    rejoin: RejoinFlag = False,
    lines: LinesFlag = None,
    metrics: MetricsFlag = None,
    json: JsonFlag = None,
    html: HtmlFlag = None,
    debug: DebugFlag = False,
) -> None:
    """Move the weights: under torchrun, or by itself on this machine."""
    from reshard_cli.cli.joined import run_joined_refit
    from reshard_cli.cli.refit import run_refit
    from reshard_cli.cli.telling import Telling
    from reshard_cli.refit.prepare import RefitOptions

    if watch is not None and origin != "synthetic":
        raise DocumentError("--watch: its folders are the sources; leave --from out")
    if watch is not None and not watch.is_dir():
        if watch.exists():
            raise DocumentError(f"--watch: {watch} is no folder")
        # it may be made later; but a slip of the pen is waited for in vain
        if os.environ.get("RANK", "0") == "0":
            print(f"--watch: {watch} is not there yet; waiting for it", file=sys.stderr, flush=True)
    endless = watch is not None or (join is not None and role == RoleName.destination)
    options = RefitOptions(
        source=source, destination=destination, model=model, mode=mode.value, origin=origin, target=target,
        iterations=iterations if iterations or endless else 1, watch=watch, double_buffer=double_buffer,
        verify=verify, staging=_bytes_of(staging), timeout=timeout, backend=backend.value, domain=domain,
        colocated=colocated, allow_extra=allow_extra, trust_checkpoint=trust_checkpoint, m2n=m2n,
    )  # fmt: skip
    telling = Telling(lines, metrics, json, html)
    if join is None:
        given = {
            "--role": role,
            "--token": token,
            "--token-file": token_file,
            "--also": also,
            "--rejoin": rejoin,
        }
        for flag, value in given.items():
            if value:
                raise typer.BadParameter(
                    "is for jobs that join each other: give --join HOST:PORT", param_hint=flag
                )
        run_refit(options, telling=telling, debug=debug)
    else:
        run_joined_refit(
            options, address=join, role=None if role is None else role.value, token=token, token_file=token_file,
            also=also or [], rejoin=rejoin, telling=telling, debug=debug,
        )  # fmt: skip


@app.command()
def bench(
    source: Source,
    destination: Destination,
    modes: Annotated[
        str | None,
        typer.Option(
            "--modes",
            metavar="a,b,...",
            help="the modes to measure, in turn; default: all, with --sweep broadcast,reshard",
        ),
    ] = None,
    mode: Annotated[
        ModeName | None, typer.Option("--mode", help="the only mode to measure, as --modes with one")
    ] = None,
    warmup: Annotated[int, typer.Option("--warmup", min=0, help="refits of each mode that do not count")] = 2,
    repeats: Annotated[int, typer.Option("--repeats", min=1, help="refits of each mode that do")] = 7,
    scale: Annotated[
        float | None,
        typer.Option(
            "--scale",
            metavar="F",
            help="shrink the jobs and their model to what this machine holds (0 < F < 1): at most F times the bytes, "
            "by fewer layers, fewer experts and narrower sizes alike; F times the ranks, but enough that every axis of "
            "several coordinates keeps several, or as many as --emulate has",
        ),
    ] = None,
    sweep: Annotated[
        str | None,
        typer.Option(
            "--sweep",
            metavar="[MIN:MAX[:FACTOR]]",
            is_flag=False,
            flag_value="1K:1G:4",
            help="measure one tensor of these sizes instead of the model, from rows to columns over the jobs' ranks; "
            "alone, behind the documents: 1K:1G:4",
        ),
    ] = None,
    model: ModelFlag = None,
    verify: Annotated[bool, typer.Option("--verify", help="compare every element, once a mode")] = False,
    emulate: Annotated[
        str | None,
        typer.Option("--emulate", metavar="NxM", help="on N emulated nodes of M ranks (root, iproute2)"),
    ] = None,
    nic: Annotated[
        str, typer.Option("--nic", metavar="RATE", help="with --emulate: each node's NIC, as 1gbit")
    ] = "1gbit",
    staging: StagingFlag = 512,
    timeout: TimeoutFlag = 120,
    backend: BackendFlag = BackendName.auto,
    domain: DomainFlag = None,
    json: JsonFlag = None,
    csv: Annotated[
        str | None, typer.Option("--csv", metavar="FILE", help="write every repeat's seconds")
    ] = None,
    html: HtmlFlag = None,
    debug: DebugFlag = False,
) -> None:
    """Measure refits of synthetic weights in memory: interleaved repeats, medians, bytes planned and counted."""
    from reshard_cli.cli.bench import BenchFlags, run_bench
    from reshard_cli.refit.prepare import RefitOptions

    if mode is not None and modes is not None:
        raise DocumentError("--mode and --modes: give one of them")
    run_bench(
        RefitOptions(
            source=source, destination=destination, model=model, verify=verify, staging=_bytes_of(staging),
            timeout=timeout, backend=backend.value, domain=domain,
        ),
        BenchFlags(
            modes=modes if mode is None else mode.value, warmup=warmup, repeats=repeats, scale=scale, sweep=sweep, emulate=emulate, nic=nic,
            json_file=json, csv_file=csv, html_file=html,
        ),
        debug=debug,
    )  # fmt: skip


@app.command()
def layouts(
    name: Annotated[
        str | None,
        typer.Argument(metavar="[NAME]", help="a preset, a shipped document, or a layout document's file"),
    ] = None,
    expand: Annotated[
        bool, typer.Option("--expand", help="print a layout without its preset, written out by hand")
    ] = False,
    model: ModelFlag = None,
    ranks: Annotated[
        int | None, typer.Option("--ranks", min=1, help="with --expand of a preset: the job's ranks")
    ] = None,
    parallel: Annotated[
        str, typer.Option("--parallel", metavar="tp=N,...", help="with --expand of a preset: its sizes")
    ] = "",
    debug: DebugFlag = False,
) -> None:
    """List the engine presets and the documents that come along; show one; write a preset out by hand."""
    from reshard_cli.cli.layouts import run_layouts

    run_layouts(name, expand=expand, model=model, ranks=ranks, parallel=parallel)


@app.command()
def inspect(
    folder: Annotated[Path, typer.Argument(metavar="FOLDER", help="checkpoint folder, or a model document")],
    write: Annotated[
        Path | None, typer.Option("--write", metavar="FILE", help="write a model document")
    ] = None,
    name: Annotated[str | None, typer.Option("--name", help="the model's name in that document")] = None,
    trust_checkpoint: TrustFlag = False,
    json: JsonFlag = None,
    debug: DebugFlag = False,
) -> None:
    """Print a model's tensors, from headers alone; write them as a model document."""
    from reshard_cli.cli.inspect import run_inspect

    run_inspect(folder, write=write, name=name, json_file=json, trust=trust_checkpoint)


@app.command()
def schema(
    kind: Annotated[DocumentKind, typer.Argument(help="which document")] = DocumentKind.layout,
) -> None:
    """Print the JSON Schema of a document, for editors."""
    from reshard_cli.cli.schema import run_schema

    run_schema(kind.value)


def _version(asked: bool) -> None:
    if asked:
        print(f"reshard-cli {__version__}")
        raise typer.Exit()


@app.callback()
def _root(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="print the version")
    ] = False,
) -> None:
    pass


def _bytes_of(mebibytes: float) -> int:
    if not 0 < mebibytes < 2**40:
        message = f"must be a number of MiB, more than 0 and less than 2**40, not {mebibytes:g}"
        raise typer.BadParameter(message, param_hint="--staging")
    return max(1, int(mebibytes * 2**20))


def main() -> None:
    """Run the command line; the entry point of `reshard-cli` and of `python -m reshard_cli`."""
    # torch's own account of a lost peer is not for people; looking for pydantic's plugins takes time for nothing
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    os.environ.setdefault("PYDANTIC_DISABLE_PLUGINS", "__all__")
    try:
        app()
    except ReshardError as error:
        print(f"error: {error}", file=sys.stderr)
        if "--debug" in sys.argv:
            traceback.print_exception(error)
        sys.exit(error.exit_code)
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(0)
