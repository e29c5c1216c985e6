"""Inside a program that uses CUDA already: busy streams, graphs, the compiler, autograd, and a thousand times."""

from __future__ import annotations

import contextlib
import importlib.util
import shutil

import pytest
import torch
from support import gpu_worker, plain_models, worker
from support.processes import RemoteError
from support.worker import digest

from torchwcache import WeightCache

pytestmark = pytest.mark.gpu

MIB = 1 << 20


# ---- streams, other models ---------------------------------------------------------------------------------------------------


def attach_while_busy(here, *, cfg, under):
    """Attach while another stream works, under a stream of its own or not; returns what both gave."""
    device = torch.device(cfg["device"])
    busy = torch.cuda.Stream()
    x = torch.ones(512, 512, device=device) / 512
    torch.cuda.synchronize()
    with torch.cuda.stream(busy):
        torch.cuda._sleep(1_000_000_000)
        for _ in range(20):
            x = x @ x.T
    context = torch.cuda.stream(torch.cuda.Stream()) if under == "a stream" else contextlib.nullcontext()
    with context:
        report = gpu_worker.attach(here, cfg=cfg)
        answer = gpu_worker.output(here)
    busy.synchronize()
    torch.cuda.synchronize()
    return {"source": report["source"], "answer": answer, "other": bool(torch.isfinite(x).all()), "later": gpu_worker.output(here)}


@pytest.mark.parametrize("under", ["a stream", "the default stream"])
def test_attach_beside_busy_streams(under, workers, daemon, linked):
    producer, client, plain = workers.several(3)
    plain.do(gpu_worker.attach, cfg=linked, mode="off")
    answer = plain.do(gpu_worker.output)
    for one, source in ((producer, "disk"), (client, "cache")):
        found = one.do(attach_while_busy, cfg=linked, under=under)
        assert found == {"source": source, "answer": answer, "other": True, "later": answer}
    assert client.do(gpu_worker.state) == producer.do(gpu_worker.state) == plain.do(gpu_worker.state)


def test_several_models_in_one_process(workers, daemon, linked, zoo, wide):
    models = {"linked": linked, "zoo": zoo, "wide": wide}
    producer, client = workers.several(2)
    for name, cfg in models.items():
        assert producer.do(gpu_worker.attach, cfg=cfg, name=name)["published"]
    for name, cfg in reversed(models.items()):
        assert client.do(gpu_worker.attach, cfg=cfg, name=name)["source"] == "cache"
    for name in models:
        assert client.do(gpu_worker.output, name=name) == producer.do(gpu_worker.output, name=name)
    client.do(worker.close, name="zoo")
    for name in ("linked", "wide"):
        assert client.do(gpu_worker.output, name=name) == producer.do(gpu_worker.output, name=name)


def attach_often(here, *, cfg, times):
    """Attach and detach; what this process uses after a few rounds and after many, and where the weights lay."""
    found, places = [], set()
    for number in range(times):
        attachment = WeightCache.attach(worker.config(cfg), fallback="error")
        with attachment as model:
            places.add(model.block.weight.data_ptr())
            if number % 100 == 0:
                gpu_worker.answer_of(model)
        del model
        assert attachment.report.same_addresses, "what was mapped before is still there"
        if number in (99, times - 1):
            found.append(gpu_worker.usage())
    return {"early": found[0], "late": found[1], "places": len(places), "left": gpu_worker.still_mapped(sorted(places))}


def test_a_thousand_times(alone, workers, daemon, linked):
    holder, one = workers.fresh(), workers.fresh()
    holder.do(gpu_worker.attach, cfg=linked)
    found = one.do(attach_often, cfg=linked, times=1000)
    early, late = found["early"], found["late"]
    assert (found["places"], found["left"]) == (1, [])
    assert late["fds"] == early["fds"]
    assert late["free"] >= early["free"] - 8 * MIB
    assert late["VmSize"] <= early["VmSize"] + 64 * MIB
    assert late["VmRSS"] <= early["VmRSS"] + 64 * MIB
    assert late["maps"] <= early["maps"] + 20
    assert (late["allocated"], late["reserved"]) == (early["allocated"], early["reserved"])
    assert holder.do(gpu_worker.entries)[0]["leases"] == 1


# ---- autograd ----------------------------------------------------------------------------------------------------------------


def attach_under(here, *, cfg, mode):
    """Attach under a mode of autograd, then use the model outside of it."""
    with getattr(torch, mode)():
        report = gpu_worker.attach(here, cfg=cfg)
    model = here.models["model"]
    tensors = [*model.parameters(), *model.buffers()]
    return {
        "source": report["source"],
        "inference": any(tensor.is_inference() for tensor in tensors),
        "requires_grad": any(parameter.requires_grad for parameter in model.parameters()),
        "gradients": gradients(here),
    }


def gradients(here, *, name="model"):
    """Digests of the gradients for what went in, and for the weights where they want any."""
    model = here.models[name]
    x = torch.linspace(-1, 1, 1024, device=gpu_worker.device_of(model)).reshape(1, 1024).requires_grad_()
    model(x).square().sum().backward()
    found = [digest(x.grad), *(digest(parameter.grad) for parameter in model.parameters() if parameter.requires_grad)]
    for parameter in model.parameters():
        parameter.grad = None
    return found


@pytest.fixture
def stack(tmp_path, device):
    """Four layers of 4 MiB, and their checkpoint."""
    path = plain_models.save(plain_models.Wide, tmp_path / "stack.safetensors", layers=4)
    return {"checkpoint": path, "build": "support.plain_models:Wide", "build_kwargs": {"layers": 4}, "device": device}


@pytest.mark.parametrize("mode", ["inference_mode", "no_grad"])
def test_attach_under_a_mode_of_autograd(mode, workers, daemon, stack):
    producer, client, plain = workers.several(3)
    plain.do(gpu_worker.attach, cfg=stack, mode="off")
    expected = plain.do(gradients)
    for one, source in ((producer, "disk"), (client, "cache")):
        found = one.do(attach_under, cfg=stack, mode=mode)
        assert found == {"source": source, "inference": False, "requires_grad": False, "gradients": expected}


def test_gradients_through_attached_weights(workers, daemon, stack):
    producer, client, plain = workers.several(3)
    for one, options in ((producer, {}), (client, {}), (plain, {"mode": "off"})):
        one.do(gpu_worker.attach, cfg=stack, requires_grad=True, **options)
    expected = plain.do(gradients)
    assert len(expected) == 5
    assert client.do(gradients) == producer.do(gradients) == expected


# ---- graphs and the compiler -------------------------------------------------------------------------------------------------


def capture_and_replay(here, *, name="model"):
    """The model's answer as it is computed, and as a captured graph gives it again for another input."""
    model = here.models[name]
    inputs = gpu_worker.inputs_of(model)
    (x,) = inputs.values()
    other = torch.linspace(-2, 2, x.numel(), device=x.device).reshape(x.shape)
    with torch.no_grad():
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(3):
                model(**inputs)
        torch.cuda.current_stream().wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            y = model(**inputs)
        x.copy_(other)
        graph.replay()
        torch.cuda.synchronize()
        return [digest(y), torch.allclose(y, model(other), rtol=1e-4, atol=1e-6)]


def test_graphs_over_attached_weights(workers, daemon, stack):
    producer, client, plain = workers.several(3)
    for one, options in ((producer, {}), (client, {}), (plain, {"mode": "off"})):
        one.do(gpu_worker.attach, cfg=stack, **options)
    expected = plain.do(capture_and_replay)
    assert expected[1]
    assert client.do(capture_and_replay) == producer.do(capture_and_replay) == expected


def compile_and_compare(here, *, name="model"):
    """Compile the model, and ask it twice; a second compilation would be an error."""
    import torch._dynamo.config

    model = here.models[name]
    inputs = gpu_worker.inputs_of(model)
    with torch.no_grad(), torch._dynamo.config.patch(error_on_recompile=True):
        expected = model(**inputs)
        compiled = torch.compile(model, fullgraph=True)
        return [torch.allclose(compiled(**inputs), expected, rtol=1e-3, atol=1e-5) for _ in range(2)]


def test_a_compiled_model(workers, daemon, stack, tmp_path):
    if not any(map(shutil.which, ("cc", "gcc", "clang"))) or importlib.util.find_spec("triton") is None:
        pytest.skip("torch.compile needs Triton and a C compiler")
    producer = workers()
    client = workers.fresh(TORCHINDUCTOR_CACHE_DIR=str(tmp_path / "inductor"), TORCHINDUCTOR_COMPILE_THREADS="1")
    producer.do(gpu_worker.attach, cfg=stack)
    client.do(gpu_worker.attach, cfg=stack)
    before = client.do(gpu_worker.state)
    try:
        assert client.do(compile_and_compare) == [True, True]
    except RemoteError as error:
        if any(missing in error.text for missing in ("Python.h", "-lcuda", "C compiler")):
            pytest.skip(f"the compiler's toolchain is not complete: {error.text[:200]}")
        raise
    assert client.do(gpu_worker.state) == before
    client.do(worker.close)
    assert client.do(gpu_worker.attach, cfg=stack)["source"] == "cache"
    assert client.do(gpu_worker.output) == producer.do(gpu_worker.output)
