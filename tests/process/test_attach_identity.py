"""Same fingerprint, same bytes and same code: what is told apart, and what is found again."""

from __future__ import annotations

import importlib
import os
import shutil
import subprocess
import sys
import textwrap

import pytest
from support import plain_models, worker

LINKED = "support.plain_models:Linked"


def linked_at(path, **options):
    return {"checkpoint": plain_models.save(plain_models.Linked, path, **options), "build": LINKED}


def output_without_us(crew, cfg):
    plain = crew()
    plain.do(worker.load_without_us, cfg=cfg)
    return plain.do(worker.output)


# ---- content (F1) ------------------------------------------------------------------------------------------------------------


def test_two_fine_tunes_with_equal_headers(workers, daemon, tmp_path):
    first = linked_at(tmp_path / "a" / "model.safetensors")
    second = linked_at(tmp_path / "b" / "model.safetensors", change=("block.weight", 5))
    assert os.path.getsize(first["checkpoint"]) == os.path.getsize(second["checkpoint"])
    one, other = workers.several(2)
    a, b = one.do(worker.attach, cfg=first), other.do(worker.attach, cfg=second)
    assert a["fingerprint"] != b["fingerprint"]
    assert b["source"] == "disk"
    assert b["differences"] == [], "another folder is another slot: simply a miss"
    assert other.do(worker.output) == output_without_us(workers, second)
    assert one.do(worker.output) == output_without_us(workers, first)
    assert len({one.do(worker.output), other.do(worker.output)}) == 2


def test_the_same_files_elsewhere_are_a_hit(workers, daemon, tmp_path):
    first = linked_at(tmp_path / "a" / "model.safetensors")
    (tmp_path / "b").mkdir()
    copy = {**first, "checkpoint": str(shutil.copy(first["checkpoint"], tmp_path / "b" / "renamed.safetensors"))}
    link = {**first, "checkpoint": str(tmp_path / "link.safetensors")}
    os.symlink(first["checkpoint"], link["checkpoint"])
    one, other = workers.several(2)
    made = one.do(worker.attach, cfg=first)
    for cfg in (copy, link):
        report = other.do(worker.attach, cfg=cfg)
        assert (report["source"], report["fingerprint"]) == ("cache", made["fingerprint"])


@pytest.mark.parametrize("aged", [True, False], ids=["old files", "new files"])
def test_rewritten_in_place_with_size_and_time_restored(aged, workers, daemon, tmp_path):
    """F1 and F22: a new entry is published beside the old one, which serves its holders until they leave."""
    cfg = linked_at(tmp_path / "model.safetensors")
    path = cfg["checkpoint"]
    if aged:
        os.utime(path, ns=(10**18, 10**18))
    before = os.stat(path)
    first, second, third = workers.several(3)
    old = first.do(worker.attach, cfg=cfg)
    old_output = first.do(worker.output)
    second.do(worker.attach, cfg=cfg, name="old")

    plain_models.save(plain_models.Linked, tmp_path / "new.safetensors", change=("block.weight", 3))
    with open(path, "r+b") as file:
        file.write((tmp_path / "new.safetensors").read_bytes())
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
    assert (os.stat(path).st_size, os.stat(path).st_mtime_ns) == (before.st_size, before.st_mtime_ns)

    new = third.do(worker.attach, cfg=cfg)
    assert new["source"] == "disk"
    assert new["published"]
    assert new["fingerprint"] != old["fingerprint"]
    assert [difference["path"] for difference in new["differences"]] == ["checkpoint.content"]
    assert "differs" in new["warnings"][0]
    assert third.do(worker.output) == output_without_us(workers, cfg) != old_output

    held = {entry["key"]: entry for entry in third.do(worker.entries)}
    assert held[old["fingerprint"]]["superseded"]
    assert held[old["fingerprint"]]["leases"] == 2
    assert first.do(worker.output) == second.do(worker.output, name="old") == old_output
    assert second.do(worker.attach, cfg=cfg)["fingerprint"] == new["fingerprint"]

    first.do(worker.close)
    assert len(third.do(worker.entries)) == 2
    second.do(worker.close, name="old")
    assert [entry["key"] for entry in third.do(worker.entries)] == [new["fingerprint"]]
    assert second.do(worker.output) == third.do(worker.output)


def test_a_mismatch_can_be_an_error(workers, daemon, tmp_path):
    cfg = linked_at(tmp_path / "model.safetensors")
    one, other = workers.several(2)
    one.do(worker.attach, cfg=cfg)
    error = other.fails(worker.attach, cfg={**cfg, "dtype": "bfloat16"}, on_mismatch="error")
    assert error.type == "MismatchError"
    assert "dtype: wanted 'bfloat16', cached None" in error.text
    assert "bfloat16" in error.facts["differences"]
    assert len(one.do(worker.entries)) == 1
    report = other.do(worker.attach, cfg={**cfg, "dtype": "bfloat16"}, on_mismatch="load")
    assert report["source"] == "disk"
    assert "wanted 'bfloat16', cached None" in report["warnings"][0]


# ---- jobs and ranks (F3, D16) ------------------------------------------------------------------------------------------------


def test_two_jobs_on_one_daemon_are_never_confused(workers, daemon, tmp_path):
    jobs = {
        (job, rank): {
            **linked_at(tmp_path / job / "model.safetensors", seed=job == "b"),
            "parallel": {"tp_size": 2, "tp_rank": rank},
        }
        for job in ("a", "b")
        for rank in (0, 1)
    }
    producers, clients = workers.several(4), workers.several(4)
    for one, cfg in zip(producers, jobs.values(), strict=True):
        one.begin(worker.attach, cfg=cfg)
    made = [one.result() for one in producers]
    assert len({report["fingerprint"] for report in made}) == 4
    assert len({report["slot"] for report in made}) == 4
    for one, cfg, report in zip(clients, jobs.values(), made, strict=True):
        found = one.do(worker.attach, cfg=cfg)
        assert (found["source"], found["fingerprint"]) == ("cache", report["fingerprint"])
    outputs = [one.do(worker.output) for one in clients]
    assert outputs == [one.do(worker.output) for one in producers]
    assert outputs[0] == outputs[1] != outputs[2] == outputs[3]


def test_data_parallel_ranks_share_an_entry_unless_they_matter(workers, daemon, tmp_path):
    cfg = linked_at(tmp_path / "model.safetensors")
    one, other = workers.several(2)
    first = one.do(worker.attach, cfg={**cfg, "parallel": {"dp_size": 2, "dp_rank": 0}})
    second = other.do(worker.attach, cfg={**cfg, "parallel": {"dp_size": 2, "dp_rank": 1}})
    assert (second["source"], second["fingerprint"]) == ("cache", first["fingerprint"])
    expert = [{"dp_size": 2, "dp_rank": rank, "dp_matters": True} for rank in (0, 1)]
    third = one.do(worker.attach, cfg={**cfg, "parallel": expert[0]}, name="expert")
    fourth = other.do(worker.attach, cfg={**cfg, "parallel": expert[1]}, name="expert")
    assert len({report["fingerprint"] for report in (first, third, fourth)}) == 3
    assert fourth["source"] == "disk"


# ---- code (D2, F20) ----------------------------------------------------------------------------------------------------------

USER_CODE = """
    import torch
    from torch import nn

    from {helpers} import factor

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.block = nn.Linear(4, 4)

        def example_inputs(self):
            return {{"x": torch.ones(2, 4)}}

        def forward(self, x):
            return self.block(x)

    def finalize(module):
        with torch.no_grad():
            module.block.weight.mul_(factor() * {own})
"""


def use_code(here, *, folder):
    """Import from a folder, as it is now."""
    if folder not in sys.path:
        sys.path.insert(0, folder)
    for name in [name for name in sys.modules if name.startswith("user_")]:
        del sys.modules[name]
    importlib.invalidate_caches()


def write_code(folder, *, factor=2, own=1):
    folder.mkdir(exist_ok=True)
    (folder / "user_helpers.py").write_text(f"def factor():\n    return {factor}\n")
    (folder / "user_net.py").write_text(textwrap.dedent(USER_CODE.format(helpers="user_helpers", own=own)))
    return str(folder)


@pytest.mark.parametrize("edit", [{"factor": 3}, {"own": 5}], ids=["a helper", "finalize itself"])
def test_edited_code_is_another_model(edit, workers, daemon, tmp_path):
    folder = write_code(tmp_path / "code")
    checkpoint = plain_models.save(plain_models.Layered, tmp_path / "layered.safetensors")
    path = str(tmp_path / "net.safetensors")
    rename(checkpoint, path)
    cfg = {"checkpoint": path, "build": "user_net:Net", "finalize": "user_net:finalize"}
    one, other, third = workers.several(3)
    for worker_ in (one, other):
        worker_.do(use_code, folder=folder)
    made = one.do(worker.attach, cfg=cfg)
    assert other.do(worker.attach, cfg=cfg)["source"] == "cache", "the user's own code in two processes is the same code"
    write_code(tmp_path / "code", **edit)
    third.do(use_code, folder=folder)
    report = third.do(worker.attach, cfg=cfg)
    assert report["fingerprint"] != made["fingerprint"]
    assert {difference["path"].split(".")[0] for difference in report["differences"]} <= {"code", "model"}
    third.do(worker.load_without_us, cfg=cfg, name="plain")
    assert third.do(worker.output) == third.do(worker.output, name="plain")
    assert third.do(worker.output) != other.do(worker.output)
    for worker_ in (one, other, third):
        worker_.do(worker.close)
        worker_.kill()


def rename(path, target):
    """``layer.*`` becomes ``block.*``."""
    from safetensors.torch import load_file, save_file

    save_file({name.replace("layer.", "block."): tensor for name, tensor in load_file(path).items()}, target)


SCRIPT = """
    import sys, torch
    from torch import nn
    from torchwcache import ModelConfig, WeightCache

    class Net(nn.Module):
        def __init__(self, scale=1.0):
            super().__init__()
            self.layer = nn.Linear(4, 4)
            self.scale = scale

        def forward(self, x):
            return self.layer(x) * self.scale

    def finalize(module):
        module.done = "yes"

    if __name__ == "__main__":
        build = {build}
        cfg = ModelConfig(sys.argv[1], build=build, finalize=finalize)
        attachment = WeightCache.attach(cfg, fallback="error")
        with attachment as model:
            answer = model(torch.ones(1, 4)).tolist()
            print(attachment.report.source, attachment.report.fingerprint, answer, model.done, model.scale)
"""


@pytest.mark.parametrize(
    "build", ["Net", "lambda: Net(2.0)", "__import__('functools').partial(Net, scale=0.5)"], ids=["class", "lambda", "partial"]
)
def test_code_in_a_script(build, workers, daemon, tmp_path):
    """F20: nothing has to be importable anywhere else, since the producer is the user's own process."""
    script = tmp_path / "serve.py"
    script.write_text(textwrap.dedent(SCRIPT.format(build=build)))
    path = plain_models.save(plain_models.Layered, tmp_path / "layered.safetensors")
    lines = []
    for _ in range(2):
        environment = {**os.environ, **workers.environment, "PYTHONHASHSEED": "random"}
        done = subprocess.run([sys.executable, str(script), path], env=environment, capture_output=True, text=True, timeout=120)
        assert done.returncode == 0, done.stderr
        lines.append(done.stdout.split(" ", 1))
    assert [source for source, _ in lines] == ["disk", "cache"]
    assert lines[0][1] == lines[1][1]


# ---- the build resolves something (D11, F2) ----------------------------------------------------------------------------------


def choose(here, *, kernel):
    os.environ["TEST_KERNEL"] = kernel


def test_a_client_that_resolves_otherwise_is_not_served_a_mixture(workers, daemon, tmp_path):
    path = plain_models.save(plain_models.Resolving, tmp_path / "resolving.safetensors")
    cfg = {"checkpoint": path, "build": "support.plain_models:Resolving"}
    producer, client = workers(TEST_KERNEL="fast"), workers(TEST_KERNEL="slow")
    made = producer.do(worker.attach, cfg=cfg)
    error = client.fails(worker.attach, cfg=cfg, on_mismatch="error")
    assert error.type == "RebindError"
    assert error.problems == {"kernel": "is 'slow' here, 'fast' in the entry"}

    report = client.do(worker.attach, cfg=cfg)
    assert (report["source"], report["published"], report["fingerprint"]) == ("disk", False, made["fingerprint"])
    (warning,) = report["warnings"]
    assert "kernel: is 'slow' here, 'fast' in the entry" in warning
    assert client.do(kernel_of) == "slow"
    assert client.do(worker.output) == producer.do(worker.output)
    assert producer.do(worker.entries)[0]["leases"] == 1, "who was not served keeps no lease"
    client.do(choose, kernel="fast")
    assert client.do(worker.attach, cfg=cfg, name="again")["source"] == "cache"


def kernel_of(here):
    return here.models["model"].kernel
