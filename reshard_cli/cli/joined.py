"""`reshard-cli refit --join`: one rank of a job that joins the other one, or the launcher of all of its ranks."""

from __future__ import annotations

import os
import secrets
import sys
from collections.abc import Callable
from pathlib import Path

from reshard_cli.cli.telling import Telling
from reshard_cli.errors import DocumentError, printable
from reshard_cli.refit.prepare import RefitOptions, check_token, parse_domain
from reshard_cli.spec.headers import is_rank_folder

__all__ = ["run_joined_refit"]

_LONGEST_TOKEN = 4096


def run_joined_refit(
    options: RefitOptions,
    *,
    address: str,
    role: str | None,
    token: str | None,
    token_file: Path | None,
    also: list[Path],
    rejoin: bool,
    telling: Telling,
    debug: bool,
) -> None:
    """Run this job's part and end the process with its exit code. Raises what can be said before it joins."""
    if role not in ("source", "destination"):
        raise DocumentError("--join: say which job this is: --role source or --role destination")
    if options.colocated:
        raise DocumentError("--colocated: jobs that join have ranks of their own; start both in one torchrun")
    if options.m2n:
        raise DocumentError("--m2n: not for jobs that join each other; start both in one torchrun")
    _refuse_flags_of_other_side(options, role, also, rejoin)
    secret = _secret(token, token_file)
    telling.check()
    parse_domain(options.domain)

    # torch takes seconds to import: a mistake in a flag is told before
    import torch

    from reshard_cli.refit.documents import described
    from reshard_cli.refit.endpoints import check_target
    from reshard_cli.refit.joined import Membership
    from reshard_cli.refit.joined_loop import JoinedRun, run_joined
    from reshard_cli.refit.library import identity_of_job, place_in_job
    from reshard_cli.refit.session import RefitReport
    from reshard_cli.report.refit_report import refit_report
    from reshard_cli.transport.gate_client import parse_address
    from reshard_cli.transport.job_launcher import launch_job

    where = parse_address(address)
    if role == "destination" and not options.target.startswith("live:"):
        check_target(options.target, "check")
    folder = Path(options.origin)
    checkpoint = role == "source" and folder.is_dir() and not is_rank_folder(folder)
    layouts = [
        described(path, options.model, folder if checkpoint else None, trust=options.trust_checkpoint)
        for path in (options.source, options.destination, *also)
    ]
    own = layouts[0] if role == "source" else layouts[1]

    def show(report: RefitReport) -> None:
        telling.report(refit_report(report))

    def note(text: str) -> None:
        print(printable(text), file=sys.stderr, flush=True)

    def rank_of(rank: int, size: int, local_rank: int, identity: str, claim: Callable[[], bool]) -> int:
        run = JoinedRun(telling.refit, show, note, claim, rejoin)
        torch.set_num_threads(max(1, (os.cpu_count() or 1) // max(1, size)))
        member = Membership(role, identity, rank, size, local_rank, where, secret)
        return run_joined(member, options, layouts[0], layouts[1], layouts[2:], run, debug=debug)

    needed = own.layout.num_ranks
    if "RANK" in os.environ or "WORLD_SIZE" in os.environ:
        rank, size, local_rank = place_in_job(None, None)
        if size != needed:
            raise DocumentError(f"layout {own.layout.name!r} has {needed} ranks, torchrun started {size}")
        sys.exit(rank_of(rank, size, local_rank, identity_of_job(), lambda: local_rank == 0))
    identity = secrets.token_hex(8)
    sys.exit(launch_job(needed, lambda rank, claim: rank_of(rank, needed, rank, identity, claim)))


def _refuse_flags_of_other_side(options: RefitOptions, role: str, also: list[Path], rejoin: bool) -> None:
    """What one job alone can do, said to the other, would be silently left undone."""
    given = {
        "--from": ("source", options.origin != "synthetic"),
        "--watch": ("source", options.watch is not None),
        "--also": ("source", bool(also)),
        "--rejoin": ("source", rejoin),
        "--to": ("destination", options.target != "memory"),
        "--double-buffer": ("destination", options.double_buffer),
    }
    for flag, (side, there) in given.items():
        if there and side != role:
            raise DocumentError(f"{flag}: is for the {side} job; leave it out on the {role}")


def _secret(token: str | None, file: Path | None) -> str:
    if token is not None and file is not None:
        raise DocumentError("--token and --token-file: give one of them")
    if file is not None:
        try:
            with file.open("rb") as opened:
                data = opened.read(_LONGEST_TOKEN + 1)
            token = data.decode().strip()
        except OSError as error:
            raise DocumentError(f"--token-file: {file} cannot be read: {error.strerror}") from error
        except UnicodeDecodeError as error:
            raise DocumentError(
                f"--token-file: {file} is no text (UTF-8); give a file with some secret words or digits"
            ) from error
        if not token:
            raise DocumentError(f"--token-file: {file} is empty; both jobs need the same secret in it")
        if len(data) > _LONGEST_TOKEN:
            raise DocumentError(
                f"--token-file: {file} is longer than {_LONGEST_TOKEN} bytes: is it the right one?"
            )
    if token is None:
        raise DocumentError("--join: jobs that join share a secret: give --token-file FILE to both of them")
    check_token(token, "--token")
    return token
