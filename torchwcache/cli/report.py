"""A report of an attach, for people."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torchwcache.cli.humanize import duration, size

__all__ = ["report_lines"]


def report_lines(report: Mapping[str, Any]) -> list[str]:
    """Lines of text.

    Args:
        report: As ``AttachReport.as_dict()`` gives it, also after a way through JSON.
    """
    phases = ", ".join(f"{name} {duration(seconds)}" for name, seconds in report["seconds"].items())
    lines = [
        f"source       {report['source']}{', and published' if report['published'] else ''}",
        f"seconds      {duration(report['total_s'])}: {phases}",
        f"mapped       {size(report['mapped_nbytes'])} in {report['tensors']} tensors, copied {size(report['copied_nbytes'])}",
        f"fingerprint  {report['fingerprint'] or '-'}",
    ]
    lines += [f"differs      {item['path']}: wanted {item['wanted']}, cached {item['cached']}" for item in report["differences"]]
    return lines + [f"warning      {text}" for text in report["warnings"]]
