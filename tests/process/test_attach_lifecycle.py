"""From ``with`` to the last tensor: leaving, keeping, forking, and doing it two hundred times."""

from __future__ import annotations

import contextlib
import gc
import os
import signal
import time
from pathlib import Path

import pytest
from support import plain_models, worker
from support.worker import digest, example_inputs, footprint


@pytest.fixture
def linked(tmp_path):
    return {
        "checkpoint": plain_models.save(plain_models.Linked, tmp_path / "linked.safetensors"),
        "build": "support.plain_models:Linked",
        "finalize": "support.plain_models:stamp",
    }


def mappings(here):
    return footprint(here, collect=False)["maps"]


def use_after_leaving(here, *, cfg):
    """Leave the ``with``, then try everything."""
    from torchwcache import WeightCache
    from torchwcache.errors import DetachedError

    gc.collect()
    gc.disable()  # the last tensor takes the memory along, whenever the next collection may be
    here.patches.callback(gc.enable)
    attachment = WeightCache.attach(worker.config(cfg))
    with attachment as model:
        kept = model.block.weight
        before, rows = digest(kept), kept.detach().clone()
        block, containers = model.block, model.conv_weights
        inputs = example_inputs(model)
        model(**inputs)
    attempts = {
        "forward": lambda: model(**inputs),
        "a submodule": lambda: block(rows),
        "state_dict": model.state_dict,
        "a tensor in a list": lambda: containers[0] + 1,
        "a parameter": lambda: model.embed.sum(),
        "a non-persistent buffer": lambda: model.angles * 2,
        "to": lambda: model.to("cpu"),
        "attachment.model": lambda: attachment.model,
    }
    raised = {}
    for what, attempt in attempts.items():
        try:
            attempt()
            raised[what] = "nothing"
        except DetachedError as error:
            raised[what] = "attachment was closed" in str(error)
    facts = {"raised": raised, "kept": digest(kept) == before, "closed": attachment.closed, "maps": [mappings(here)]}
    del kept
    facts["maps"].append(mappings(here))
    return facts


@pytest.mark.parametrize("source", ["disk", "cache"])
def test_a_module_that_was_left_says_so(source, workers, daemon, linked):
    one, other = workers.several(2)
    if source == "cache":
        other.do(worker.attach, cfg=linked)
    found = one.do(use_after_leaving, cfg=linked)
    assert found["raised"] == dict.fromkeys(found["raised"], True)
    assert found["kept"], "a tensor that was kept has its values still"
    assert found["closed"]
    first, last = found["maps"]
    assert first > 0, "a tensor that was kept keeps the memory"
    assert last == 0, "and the last one takes it along"


def test_leaving_ends_the_lease(workers, daemon, linked):
    one, other = workers.several(2)
    one.do(worker.attach, cfg=linked)
    other.do(worker.attach, cfg=linked)
    assert one.do(worker.entries)[0]["leases"] == 2
    one.do(worker.close)
    assert other.do(worker.entries)[0]["leases"] == 1
    other.do(worker.close)
    assert other.do(worker.entries)[0]["leases"] == 0, "an entry outlives all who use it"
    assert one.do(worker.attach, cfg=linked)["source"] == "cache"


def enter_and_leave(here, *, cfg):
    from torchwcache import WeightCache

    seen = []
    attachment = WeightCache.attach(worker.config(cfg))
    with attachment:
        try:
            with attachment:
                seen.append("entered twice")
        except RuntimeError as error:
            seen.append(str(error))
        seen.append(attachment.closed)
    try:
        attachment.__enter__()
    except RuntimeError as error:
        seen.append(str(error))
    attachment.close()  # idempotent
    try:
        with WeightCache.attach(worker.config(cfg)):
            raise KeyError("the user's own")
    except KeyError as error:
        seen.append(error.args[0])
    return seen


def test_entering_twice_is_an_error_and_the_users_own_errors_pass(workers, daemon, linked):
    twice = "an attachment can be entered once; attach again to get another"
    assert workers().do(enter_and_leave, cfg=linked) == [twice, False, twice, "the user's own"]


def attach_often(here, *, cfg, times):
    """What this process holds after a few rounds, and after many."""
    from torchwcache import WeightCache

    found = []
    for number in range(times):
        with WeightCache.attach(worker.config(cfg)) as model:
            model(**example_inputs(model))
        if number in (9, times - 1):
            del model
            gc.collect()
            with open("/proc/self/maps") as file:
                found.append({**footprint(here), "all maps": sum(1 for _ in file)})
    return found


def test_two_hundred_times(workers, daemon, linked):
    holder, one = workers.several(2)
    holder.do(worker.attach, cfg=linked)
    early, late = one.do(attach_often, cfg=linked, times=200)
    assert (late["maps"], late["memfds"], late["fds"]) == (0, 0, early["fds"])
    assert late["all maps"] <= early["all maps"] + 20, "the allocator may have a few more arenas"
    assert holder.do(worker.entries)[0]["leases"] == 1
    assert len(os.listdir(f"/proc/{daemon.pid}/fd")) < 40


def fork_and_use(here, *, answer, stop):
    """Use the model in a forked child, which stays until the file ``stop`` exists; returns its pid."""
    pid = os.fork()
    if pid:
        return pid
    with contextlib.suppress(BaseException):
        Path(answer + ".part").write_text(worker.output(here))
        os.rename(answer + ".part", answer)
        deadline_s = time.monotonic() + 60
        while not os.path.exists(stop) and time.monotonic() < deadline_s:
            time.sleep(0.01)
    os._exit(0)


def test_a_forked_child_may_use_the_model_and_holds_no_lease(workers, daemon, linked, tmp_path, wait_until):
    producer, parent = workers(), workers.fresh()
    producer.do(worker.attach, cfg=linked)
    parent.do(worker.attach, cfg=linked)
    expected = parent.do(worker.output)
    answer, stop = tmp_path / "answer", tmp_path / "stop"
    child = parent.do(fork_and_use, answer=str(answer), stop=str(stop))
    try:
        wait_until(answer.exists, what="the child has run the model")
        assert answer.read_text() == expected
        assert producer.do(worker.entries)[0]["leases"] == 2, "the child has no lease of its own, and did not end its parent's"
        assert parent.do(worker.output) == expected
        parent.kill()
        wait_until(lambda: producer.do(worker.entries)[0]["leases"] == 1, what="the dead parent's lease ends while its child lives")
        os.kill(child, 0)
    finally:
        stop.touch()
        with contextlib.suppress(ProcessLookupError):
            os.kill(child, signal.SIGKILL)


def copy_deeply(here, *, name="model"):
    import copy

    copied = copy.deepcopy(here.models[name])
    with_zeros = next(copied.parameters())
    with_zeros.data.zero_()
    return [digest(next(here.models[name].parameters())) != digest(with_zeros), worker.output(here, name=name)]


def test_a_deep_copy_is_the_users_own(workers, daemon, linked):
    one = workers()
    one.do(worker.attach, cfg=linked)
    expected = one.do(worker.output)
    assert one.do(copy_deeply) == [True, expected]
    assert one.do(worker.verify) == []


def attach_without_memory_for_a_copy(here, *, cfg):
    """What is mapped, and what is raised, when something fails that nobody thought of, after tensors were put in place."""
    from torchwcache import WeightCache, attaching

    gc.collect()
    gc.disable()  # nothing but the tensors keeps the memory
    here.patches.callback(gc.enable)
    rebind = attaching.rebind

    def fail(*args, **options):
        rebind(*args, **options)
        raise MemoryError("for a copy")

    here.patch(attaching, "rebind", fail)
    try:
        WeightCache.attach(worker.config(cfg))
    except MemoryError as error:
        return {"raised": str(error), "maps": mappings(here)}
    return {"raised": ""}


def test_an_attach_that_fails_in_the_end_leaves_nothing_mapped(workers, daemon, linked):
    one, other = workers.several(2)
    other.do(worker.attach, cfg=linked)
    assert one.do(attach_without_memory_for_a_copy, cfg=linked) == {"raised": "for a copy", "maps": 0}
    assert other.do(worker.entries)[0]["leases"] == 1
