"""Compare a cached entry with the checkpoint: attached in one process, loaded once more in another, down to the last bit.

Compared are names, kinds, shapes, dtypes, strides, what is tied and what shares memory, every attribute, and the xxh3-128 digests
of all memory; with --deep also what both answer to the same inputs.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from torchwcache.cli.connection import add_socket_argument, connect, socket_path
from torchwcache.cli.exit_codes import ExitCode
from torchwcache.cli.humanize import size
from torchwcache.cli.model_arguments import add_model_arguments, model_arguments, model_config
from torchwcache.errors import ConfigError
from torchwcache.verification.record import VerificationRecord

__all__ = ["add_arguments", "run"]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's arguments."""
    add_model_arguments(parser)
    add_socket_argument(parser)
    parser.add_argument("--deep", action="store_true", help="also run both models on the same inputs, and compare the answers")
    parser.add_argument(
        "--inputs",
        metavar="SOURCE",
        help="for --deep: a safetensors file of tensors named like the arguments, or MODULE:NAME, a function that gets the model "
        "(default: generated, for Transformers models)",
    )
    parser.add_argument("--timeout", type=float, default=3600.0, metavar="SECONDS", help="how long both may take (default: 3600)")
    parser.add_argument("--json", metavar="FILE", help="write the record as one JSON object to FILE (- for standard output)")


def run(args: argparse.Namespace) -> ExitCode:
    """Run the command."""
    if args.inputs is not None and not args.deep:
        raise ConfigError("--inputs is for --deep: without it nothing is run")
    model_config(args)  # a wrong value, or no daemon, is told before two processes are started
    connect(args).close()
    from torchwcache.verification.processes import verify_in_processes

    usual = model_arguments(_parser().parse_args([args.checkpoint]))
    record = verify_in_processes(
        model_arguments(args), socket=socket_path(args), deep=args.deep, inputs=args.inputs, usual=usual, timeout_s=args.timeout
    )
    facts = record.as_dict()
    text = json.dumps(facts, indent=2)
    if args.json == "-":
        print(text)
    else:
        if args.json is not None:
            Path(args.json).write_text(text + "\n")
        print("\n".join(_lines(record, facts["id"])))
    return ExitCode.OK if record.equal else ExitCode.DIFFERENT


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(add_help=False)
    add_arguments(parser)
    return parser


def _lines(record: VerificationRecord, name: str) -> list[str]:
    compared = record.compared
    lines = [f"{len(record.differences)} differences", *(f"  {difference}" for difference in record.differences)]
    if record.equal:
        lines = ["equal"]
    what = f"{compared.tensors} tensors ({size(compared.nbytes)}), {compared.attributes} attributes, {compared.modules} modules"
    if record.deep:
        what += f", {compared.outputs} outputs"
    lines.append(f"compared     {what}")
    if compared.opaque:
        lines.append(f"by type only {', '.join(compared.opaque[:5])}{', ...' if len(compared.opaque) > 5 else ''}")
    return [*lines, f"record       {name}"]
