"""Every architecture in the documentation's table: attached in another process as it was loaded, to the last bit, or refused.

The table itself is written by this file: `pytest tests/process/test_architectures.py --write-architectures`.
"""

from __future__ import annotations

import fcntl
import importlib.util
import os
import re
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest
from support import worker
from support.architectures import ARCHITECTURES, architecture, write_checkpoint

from torchwcache.verification.comparison import compare_descriptions
from torchwcache.verification.description import decode_description

PAGE = Path(__file__).parents[2] / "docs" / "architectures.md"
FROM_A_LOAD = {
    "generation_config*": "read by every client",
    "*_weight_conversions": "the record of a load, made anew when it is asked for",
    "*_commit_hash": "where the files are from",
    "*name_or_path": "where the files are",
    "*_internal_dict*_use_default_values*": "diffusers makes a list of a set of strings: its order is another in every process",
}
"""What a plain ``from_pretrained`` leaves behind and an attach does not, or the other way round; tests of their own look at it."""


def make(here, *, name, folder):
    return write_checkpoint(name, Path(folder))


def describe(here, *, path, name="model"):
    """Leave a description of the model in a file; returns digests of its answer."""
    from torchwcache.adapter import CaptureRules
    from torchwcache.verification.describe import describe_module
    from torchwcache.verification.description import encode_description
    from torchwcache.verification.inputs import describe_outputs, generate_inputs

    model = here.models[name].requires_grad_(False)
    Path(path).write_bytes(encode_description(describe_module(model, rules=CaptureRules(ignore=FROM_A_LOAD))))
    if hasattr(model, "example_inputs"):
        inputs = model.example_inputs()
    elif type(model).__module__.startswith("diffusers."):
        from support.plain_architectures import diffusers_inputs

        inputs = diffusers_inputs(model)
    else:
        inputs = generate_inputs(model)
    answer = describe_outputs(model, (), inputs)
    return {place: [facts.dtype, list(facts.shape), facts.digest, facts.finite] for place, facts in answer.items()}


def each():
    """Diffusers takes several seconds to be imported, in three processes."""
    for name, item in ARCHITECTURES.items():
        yield pytest.param(name, marks=pytest.mark.slow) if item.package == "diffusers" else name


@pytest.mark.parametrize("name", list(each()))
def test_attached_as_loaded_or_refused(name, workers, daemon, tmp_path, request):
    item = architecture(name)
    if importlib.util.find_spec(item.package) is None:
        pytest.skip(f"{item.package} is not installed")
    plain, producer, client = workers.several(3)
    cfg = plain.do(make, name=name, folder=str(tmp_path))
    if item.refused is not None:
        result = refusal(cfg, item, producer, client)
    else:
        plain.do(worker.load_without_us, cfg=cfg)
        result = attached(cfg, plain, producer, client, tmp_path)
    check_row(name, result, write=request.config.getoption("--write-architectures"))


def attached(cfg, plain, producer, client, folder):
    first, second = producer.do(worker.attach, cfg=cfg), client.do(worker.attach, cfg=cfg)
    assert (first["source"], first["published"], second["source"]) == ("disk", True, "cache")
    assert second["warnings"] == []
    assert all("loaded by load_state_dict" in warning for warning in first["warnings"])  # with a copy, and no less right
    sides = {"plain": plain, "producer": producer, "client": client}
    answers = {side: one.do(describe, path=str(folder / f"{side}.description")) for side, one in sides.items()}
    described = {side: decode_description((folder / f"{side}.description").read_bytes()) for side in sides}
    for side in ("producer", "client"):
        differences, compared = compare_descriptions(described["plain"], described[side])
        assert [str(difference) for difference in differences] == [], side
        assert compared.nbytes > 0
        assert compared.opaque == ()
        assert answers[side] == answers["plain"], side
    assert answers["plain"]
    assert all(finite for *_, finite in answers["plain"].values()), "an answer of NaN hides every mistake"
    return "attached, bit-identical"


def flip_a_bit(here, *, name="model"):
    """In this process's own copy of a shared weight; returns its path."""
    import torch

    path, weight = max(here.models[name].named_parameters(), key=lambda item: item[1].numel())
    with torch.no_grad():
        weight.view(-1)[-1:].view(torch.int32).bitwise_xor_(1 << 22)
    return path


def test_the_comparison_can_fail(workers, daemon, tmp_path):
    (client,) = workers.several(1)
    cfg = client.do(make, name="attention", folder=str(tmp_path))
    client.do(worker.attach, cfg=cfg)
    before = client.do(describe, path=str(tmp_path / "before"))
    path = client.do(flip_a_bit)
    after = client.do(describe, path=str(tmp_path / "after"))
    differences, _ = compare_descriptions(*(decode_description((tmp_path / when).read_bytes()) for when in ("before", "after")))
    assert {(difference.path, difference.what) for difference in differences} == {
        (path, "values (xxh3-128)"),
        (path, "bytes of its memory (xxh3-128)"),
    }
    assert before != after


def refusal(cfg, item, producer, client):
    """Refused where it is loaded, remembered for others, and served from disk to those who want that."""
    error = producer.fails(worker.attach, cfg=cfg)
    assert "CaptureError" in error.kinds
    assert item.refused in error.text
    assert producer.do(worker.entries) == []
    assert client.fails(worker.attach, cfg=cfg).type == "RefusedError"
    assert client.do(worker.attach, cfg=cfg, on_refused="load")["source"] == "disk"
    ((path, reason),) = error.problems.items()
    return f"refused: `{path}`: {reason.partition(';')[0]}"


# ---- the table ---------------------------------------------------------------------------------------------------------------


def row_of(name, result):
    item = architecture(name)
    return f"| {item.title} | {item.covers} | {result} |"


def rows_of(text):
    """The table's rows by title."""
    rows = [line for line in text.splitlines() if line.startswith("| ")]
    return {line.split(" | ")[0].removeprefix("| "): line for line in rows[1:]}


def check_row(name, result, *, write):
    """The documentation says what came out just now; or it is made to."""
    row = row_of(name, result)
    if not write:
        assert rows_of(PAGE.read_text()).get(architecture(name).title) == row, "make architectures writes the table anew"
        return
    with open(PAGE, "r+") as page:
        fcntl.flock(page, fcntl.LOCK_EX)  # several processes run these tests
        text = page.read()
        rows = {**rows_of(text), architecture(name).title: row}
        body = "\n".join(rows[item.title] for item in ARCHITECTURES.values() if item.title in rows)
        text = re.sub(r"(?<=\|---\|---\|---\|\n)(\| .*\n)*", lambda _: body + "\n", text)
        text = re.sub(r"(?<=Run with ).*(?=\.\n)", lambda _: versions(), text)
        page.seek(0)
        page.write(text)
        page.truncate()
        page.flush()
        os.fsync(page.fileno())


def versions():
    return ", ".join(f"{name} {metadata.version(name).partition('+')[0]}" for name in ("torch", "transformers", "diffusers"))


def test_the_table_has_a_row_for_each(request):
    if request.config.getoption("--write-architectures"):
        pytest.skip("it is being written")
    rows = rows_of(PAGE.read_text())
    assert list(rows) == [item.title for item in ARCHITECTURES.values()]
    wrong: list[Any] = [row for row in rows.values() if not re.search(r"\| (attached, bit-identical|refused: .+) \|$", row)]
    assert wrong == []


def test_the_check_of_the_table_can_fail():
    with pytest.raises(AssertionError, match="make architectures"):
        check_row("llama", "refused: for no reason", write=False)
