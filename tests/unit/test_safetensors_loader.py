"""The safetensors loader: PyTorch's meaning of strict, without a second copy, and every way a checkpoint can be broken."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from torchwcache.adapter import LoadContext, LoadResult
from torchwcache.config import ModelConfig
from torchwcache.errors import CheckpointError, CheckpointNotFoundError, CorruptCheckpointError, StateDictError
from torchwcache.identity.checkpoint import CheckpointFiles
from torchwcache.loaders import fill, safetensors_file
from torchwcache.loaders.registry import LOADERS
from torchwcache.loaders.safetensors_file import SafetensorsCheckpoint, read_into_memory


class Net(nn.Module):
    def __init__(self, *, tied: bool = True) -> None:
        super().__init__()
        self.embed = nn.Embedding(10, 4)
        self.head = nn.Linear(4, 10, bias=False)
        self.norm = nn.BatchNorm1d(4)
        self.register_buffer("scale", torch.ones(3))
        self.register_buffer("rope", torch.arange(5.0), persistent=False)
        if tied:
            self.head.weight = self.embed.weight


class Context:
    """Records what a load did with what it was given."""

    def __init__(self) -> None:
        self.segments: list[torch.Tensor] = []
        self.expected: list[int] = []
        self.direct_nbytes = 0
        self.progress: list[tuple[int, int]] = []

    def allocate(self, nbytes: int) -> torch.Tensor:
        self.segments.append(torch.zeros(nbytes, dtype=torch.uint8))
        return self.segments[-1]

    def read_file(self, fd: int, offset: int, target: torch.Tensor) -> None:
        self.direct_nbytes += target.numel() * target.element_size()
        read_into_memory(fd, offset, target)

    @property
    def context(self) -> LoadContext:
        return LoadContext(
            allocate=self.allocate,
            expect=self.expected.extend,
            read_file=self.read_file,
            progress=lambda done, total: self.progress.append((done, total)),
        )


def load(path: Path, build: Any = Net, context: Context | None = None, **kwargs: Any) -> LoadResult:
    return LOADERS.get("safetensors").load(ModelConfig(path, build=build, **kwargs), (context or Context()).context)


@pytest.fixture
def state() -> dict[str, torch.Tensor]:
    torch.manual_seed(0)
    net = Net(tied=False)
    net.norm.running_mean.normal_()
    net.head.weight = net.embed.weight
    return {name: tensor.clone() for name, tensor in net.state_dict().items()}


@pytest.fixture
def save(tmp_path: Path) -> Callable[..., Path]:
    def save(state: dict[str, torch.Tensor], name: str = "model.safetensors") -> Path:
        save_file(state, tmp_path / name)
        return tmp_path / name

    return save


def assert_equal(module: nn.Module, state: dict[str, torch.Tensor], dtype: torch.dtype | None = None) -> None:
    found = module.state_dict()
    assert found.keys() == state.keys()
    for name, tensor in state.items():
        wanted = tensor.to(dtype) if dtype is not None and tensor.is_floating_point() else tensor
        assert found[name].dtype == wanted.dtype
        assert torch.equal(found[name], wanted), name


# ---- loading -----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [None, "bfloat16", "float64"])
def test_it_loads_what_load_state_dict_loads(state: dict[str, torch.Tensor], save: Callable[..., Path], dtype: str | None) -> None:
    result = load(save(state), dtype=dtype)
    assert_equal(result.module, state, getattr(torch, dtype) if dtype else None)
    assert result.module.head.weight is result.module.embed.weight
    assert torch.equal(result.module.rope, torch.arange(5.0).to(result.module.rope.dtype))
    assert (result.initialized, result.notes) == ((), [])


def test_weights_are_read_straight_into_segment_memory(state: dict[str, torch.Tensor], save: Callable[..., Path]) -> None:
    context = Context()
    module = load(save(state), context=context).module
    ranges = [(item.data_ptr(), item.data_ptr() + item.numel()) for item in context.segments]
    for name, parameter in module.named_parameters():
        assert any(start <= parameter.data_ptr() < stop for start, stop in ranges), name
    assert sorted(context.expected) == sorted(item.numel() for item in context.segments)
    read_once = sum(tensor.numel() * tensor.element_size() for name, tensor in state.items() if name != "embed.weight")
    assert context.direct_nbytes == read_once
    assert context.progress[-1] == (read_once, read_once)


def test_views_made_in_init_follow(save: Callable[..., Path]) -> None:
    class WithView(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.zeros(4, 4))
            self.rows = self.weight.detach()[1:3]

    weight = torch.randn(4, 4)
    module = load(save({"weight": weight}), WithView).module
    assert torch.equal(module.rows, weight[1:3])
    assert module.rows.untyped_storage().data_ptr() == module.weight.untyped_storage().data_ptr()


def test_what_is_computed_from_parameters_needs_a_full_build(save: Callable[..., Path]) -> None:
    class Computed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(2))
            self.doubled = self.weight.detach() * 2

    result = load(save({"weight": torch.zeros(2)}), Computed)
    assert torch.equal(result.module.doubled, torch.full((2,), 2.0))
    assert torch.equal(result.module.weight, torch.zeros(2))
    assert "doubled" in result.notes[0]


# ---- strict ------------------------------------------------------------------------------------------------------------------


class KeepsATeacher(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(2, 2)
        self.teacher = [nn.LayerNorm(2)]  # in a plain list, so that it is in no state dict


class TakesItsParameterOut(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(2, 2)
        self.scale = nn.Parameter(torch.full((2,), 5.0))
        scale = self.scale
        del self.scale
        self.__dict__["scale"] = scale


@pytest.mark.parametrize(("build", "name"), [(KeepsATeacher, "teacher[0].weight"), (TakesItsParameterOut, "scale")])
def test_parameters_outside_the_tree_keep_what_init_gave_them_and_are_listed(
    save: Callable[..., Path], build: Any, name: str
) -> None:
    result = load(save({"linear.weight": torch.ones(2, 2), "linear.bias": torch.ones(2)}), build)
    assert name in result.initialized
    found = result.module.scale if name == "scale" else result.module.teacher[0].weight
    assert found.tolist() == ([5.0, 5.0] if name == "scale" else [1.0, 1.0])


class LeavesItsBias(nn.Linear):
    def __init__(self) -> None:
        super().__init__(2, 2)
        nn.init.constant_(self.bias, 7.0)

    def _load_from_state_dict(self, state_dict: Any, prefix: str, *_: Any) -> None:
        self.weight.data.copy_(state_dict[prefix + "weight"])


def test_what_a_modules_own_loading_leaves_alone_is_as_init_made_it(save: Callable[..., Path]) -> None:
    context = Context()
    module = load(save({"weight": torch.ones(2, 2)}), LeavesItsBias, context).module
    assert module.bias.tolist() == [7.0, 7.0]
    assert not context.segments  # nothing is laid out in segments that is then given up


def test_one_of_several_tied_names_is_enough(state: dict[str, torch.Tensor], save: Callable[..., Path]) -> None:
    for name in ("embed.weight", "head.weight"):
        module = load(save({key: value for key, value in state.items() if key != name})).module
        assert_equal(module, state)


def test_tied_names_with_different_bytes_are_refused(state: dict[str, torch.Tensor], save: Callable[..., Path]) -> None:
    with pytest.raises(StateDictError, match=r"values differ for embed\.weight"):
        load(save({**state, "embed.weight": state["embed.weight"] + 1}))


def test_all_problems_are_told_at_once_in_pytorchs_words(state: dict[str, torch.Tensor], save: Callable[..., Path]) -> None:
    del state["norm.weight"], state["norm.bias"]
    broken = {**state, "extra": torch.ones(1), "scale": torch.ones(4)}
    with pytest.raises(StateDictError) as ours:
        load(save(broken))
    with pytest.raises(RuntimeError) as theirs:
        Net().load_state_dict(broken)
    assert set(str(ours.value).split("\n\t")) == set(str(theirs.value).split("\n\t"))
    assert ours.value.missing == ("norm.weight", "norm.bias")
    assert ours.value.unexpected == ("extra",)
    assert [name for name, _ in ours.value.mismatched] == ["scale"]


@pytest.mark.parametrize("seed", [None, 7])
def test_without_strict_missing_tensors_are_initialized_and_listed(
    state: dict[str, torch.Tensor], save: Callable[..., Path], seed: int | None
) -> None:
    path = save({**{k: v for k, v in state.items() if k not in ("embed.weight", "head.weight")}, "extra": torch.ones(1)})
    result = load(path, strict=False, seed=seed)
    assert set(result.initialized) == {"embed.weight", "head.weight"}
    assert "extra" in result.notes[0]
    assert result.module.embed.weight.abs().sum() > 0  # not the zeros of fresh memory
    again = load(path, strict=False, seed=seed)
    assert torch.equal(result.module.embed.weight, again.module.embed.weight) == (seed is not None)
    if seed is not None:
        torch.manual_seed(seed)
        assert torch.equal(result.module.embed.weight, Net().embed.weight)


def test_shapes_must_fit_also_without_strict(state: dict[str, torch.Tensor], save: Callable[..., Path]) -> None:
    with pytest.raises(StateDictError, match="size mismatch for scale"):
        load(save({**state, "scale": torch.ones(4)}), strict=False)


def test_values_must_survive_the_change_of_dtype(state: dict[str, torch.Tensor], save: Callable[..., Path]) -> None:
    with pytest.raises(StateDictError, match=r"torch\.float32 in the checkpoint cannot become torch\.int64"):
        load(save({**state, "norm.num_batches_tracked": torch.tensor(1.5)}))
    module = load(save({**state, "scale": torch.tensor([1, 2, 3], dtype=torch.int32)})).module
    assert torch.equal(module.scale, torch.tensor([1.0, 2.0, 3.0]))


def test_a_scalar_may_come_as_one_element(save: Callable[..., Path]) -> None:
    class Scalar(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.t = nn.Parameter(torch.tensor(0.0))

    assert load(save({"t": torch.tensor([5.0])}), Scalar).module.t.item() == 5.0


# ---- modules with loading code of their own ----------------------------------------------------------------------------------


class Renaming(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.new = nn.Linear(2, 2)
        self.register_load_state_dict_pre_hook(self._rename)

    @staticmethod
    def _rename(module: nn.Module, state: dict[str, Any], prefix: str, *_: object) -> None:
        for name in ("weight", "bias"):
            if prefix + "old." + name in state:
                state[prefix + "new." + name] = state.pop(prefix + "old." + name)


class Doubling(nn.Linear):
    def _load_from_state_dict(self, state: dict[str, Any], prefix: str, *args: Any) -> None:
        state[prefix + "weight"] = state[prefix + "weight"] * 2
        super()._load_from_state_dict(state, prefix, *args)


@pytest.mark.parametrize("build", [Renaming, Doubling])
def test_hooks_and_overrides_run(save: Callable[..., Path], build: Any) -> None:
    state = {"weight": torch.randn(2, 2), "bias": torch.randn(2)}
    if build is Renaming:
        state = {f"old.{name}": tensor for name, tensor in state.items()}
    kwargs = {"build_kwargs": {"in_features": 2, "out_features": 2}} if build is Doubling else {}
    result = load(save(state), build, **kwargs)
    plain = build(**kwargs.get("build_kwargs", {}))
    plain.load_state_dict(dict(state))
    assert_equal(result.module, plain.state_dict())
    assert "loaded by load_state_dict" in result.notes[0]
    with pytest.raises(StateDictError, match="Missing key"):
        load(save({next(reversed(state)): state[next(reversed(state))]}), Renaming)


def test_an_old_batchnorm_without_its_counter_loads_as_in_pytorch(
    state: dict[str, torch.Tensor], save: Callable[..., Path]
) -> None:
    del state["norm.num_batches_tracked"]
    result = load(save(state))
    assert result.module.norm.num_batches_tracked.item() == 0
    assert result.initialized == ()


# ---- files -------------------------------------------------------------------------------------------------------------------


@pytest.fixture
def sharded(tmp_path: Path, state: dict[str, torch.Tensor]) -> Path:
    folder = tmp_path / "sharded"
    folder.mkdir()
    weight_map = {}
    for number, name in enumerate(state):
        weight_map[name] = f"model-{number % 3}.safetensors"
    for shard in set(weight_map.values()):
        save_file({name: state[name] for name, where in weight_map.items() if where == shard}, folder / shard)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    return folder


@pytest.mark.parametrize("how", ["index", "no index", "another index", "index itself"])
def test_shards_load_with_an_index_and_without(sharded: Path, state: dict[str, torch.Tensor], how: str) -> None:
    path, index = sharded, sharded / "model.safetensors.index.json"
    if how == "no index":
        index.unlink()
    elif how == "another index":
        index.rename(sharded / "consolidated.index.json")
    elif how == "index itself":
        path = index
    assert_equal(load(path).module, state)


def test_the_files_are_what_load_opens(sharded: Path) -> None:
    loader = LOADERS.get("safetensors")
    (sharded / "unrelated.txt").write_text("x")
    names = [name for name, _ in loader.files(ModelConfig(sharded, build=Net)).files]
    assert names == ["model-0.safetensors", "model-1.safetensors", "model-2.safetensors", "model.safetensors.index.json"]
    assert loader.quantization_config(ModelConfig(sharded, build=Net)) is None
    (sharded / "config.json").write_text('{"text_config": {"quantization_config": {"quant_method": "gptq"}}}')
    assert "config.json" in [name for name, _ in loader.files(ModelConfig(sharded, build=Net)).files]
    assert loader.quantization_config(ModelConfig(sharded, build=Net)) == {"quant_method": "gptq"}


def rewrite_index(folder: Path, **changes: Any) -> None:
    path = folder / "model.safetensors.index.json"
    index = json.loads(path.read_text())
    index["weight_map"].update(changes)
    path.write_text(json.dumps(index))


def broken(folder: Path, how: str) -> None:
    shard, index = folder / "model-1.safetensors", folder / "model.safetensors.index.json"
    raw = shard.read_bytes()
    match how:
        case "missing shard":
            shard.unlink()
        case "absent tensor":
            rewrite_index(folder, ghost="model-1.safetensors")
        case "escaping index":
            rewrite_index(folder, ghost="../model-1.safetensors")
        case "absolute index":
            rewrite_index(folder, ghost="/etc/passwd")
        case "no weight map":
            index.write_text("{}")
        case "index not json":
            index.write_text("{")
        case "index a list":
            index.write_text("[]")
        case "duplicate":
            shutil.copy(shard, folder / "zzz.safetensors")
            index.unlink()
        case "empty file":
            shard.write_bytes(b"")
        case "no header":
            shard.write_bytes(raw[:4])
        case "truncated header":
            shard.write_bytes(raw[:40])
        case "truncated data":
            shard.write_bytes(raw[:-1])
        case "too long":
            shard.write_bytes(raw + b"x")
        case "huge header":
            shard.write_bytes((2**63).to_bytes(8, "little") + raw[8:])
        case "garbage header":
            shard.write_bytes(raw[:8] + b"\xff" * (len(raw) - 8))
        case "overlap":
            header = {name: {"dtype": "U8", "shape": [4], "data_offsets": [0, 4]} for name in "ab"}
            text = json.dumps(header).encode()
            shard.write_bytes(len(text).to_bytes(8, "little") + text + bytes(4))
        case "a pickle":
            torch.save({"a": torch.ones(2)}, shard)


DAMAGED = ("empty file", "no header", "truncated header", "truncated data", "too long", "huge header", "garbage header")


@pytest.mark.parametrize(
    ("how", "error", "named"),
    [
        ("missing shard", CheckpointNotFoundError, "model-1.safetensors"),
        ("absent tensor", CorruptCheckpointError, "ghost"),
        ("escaping index", CorruptCheckpointError, "ghost"),
        ("absolute index", CorruptCheckpointError, "/etc/passwd"),
        ("no weight map", CorruptCheckpointError, "weight_map"),
        ("index not json", CorruptCheckpointError, "index.json"),
        ("index a list", CorruptCheckpointError, "index.json"),
        ("duplicate", CorruptCheckpointError, "zzz.safetensors"),
        *(
            (how, CorruptCheckpointError, "model-1.safetensors")
            for how in (
                "empty file",
                "no header",
                "truncated header",
                "truncated data",
                "too long",
                "huge header",
                "garbage header",
            )
        ),
        ("overlap", CorruptCheckpointError, "model-1.safetensors"),
        ("a pickle", CorruptCheckpointError, "model-1.safetensors"),
    ],
)
def test_broken_checkpoints_each_have_their_error(
    sharded: Path, how: str, error: type[Exception], named: str, open_fds: Any
) -> None:
    broken(sharded, how)
    before = open_fds()
    with pytest.raises(error) as caught:
        load(sharded)
    assert named in str(caught.value)
    assert open_fds() == before


def test_what_is_not_there_says_what_is(tmp_path: Path) -> None:
    with pytest.raises(CheckpointNotFoundError, match="no such checkpoint"):
        load(tmp_path / "gone")
    (tmp_path / "model.bin").write_bytes(b"")
    with pytest.raises(CheckpointNotFoundError, match=r"only safetensors are read, not model\.bin"):
        load(tmp_path)


def test_two_indexes_are_not_guessed_between(sharded: Path) -> None:
    index = sharded / "model.safetensors.index.json"
    shutil.copy(index, sharded / "a.index.json")
    assert load(sharded)
    index.rename(sharded / "b.index.json")
    with pytest.raises(CheckpointError, match=r"a\.index\.json, b\.index\.json"):
        load(sharded)


def test_truncation_while_reading_is_an_error_not_a_signal(sharded: Path) -> None:
    with SafetensorsCheckpoint(LOADERS.get("safetensors").files(ModelConfig(sharded, build=Net))) as checkpoint:
        for path in checkpoint.paths:
            os.truncate(path, 100)
        with pytest.raises(CorruptCheckpointError, match="truncated while it was being read"):
            checkpoint.read("embed.weight")
        with pytest.raises(CorruptCheckpointError, match="truncated while it was being read"):
            fill.fill(checkpoint, [(name, torch.empty(checkpoint.info(name).shape)) for name in checkpoint.names()])


# ---- tensors and slices ------------------------------------------------------------------------------------------------------

# The library's save_file knows no e8m0.
DTYPES = [dtype for dtype in safetensors_file.DTYPES.values() if dtype is not torch.float8_e8m0fnu]


@pytest.mark.parametrize("piece", [16 << 20, 64, 10])
def test_tensors_and_slices_by_name(save: Callable[..., Path], monkeypatch: pytest.MonkeyPatch, piece: int) -> None:
    monkeypatch.setattr(safetensors_file, "_PIECE_NBYTES", piece)
    monkeypatch.setattr(safetensors_file, "_SHORT_ROW_NBYTES", piece // 2)
    cube = torch.randn(7, 5, 3)
    path = save({"cube": cube, "scalar": torch.tensor(3.0), "empty": torch.zeros(0, 3)})
    with SafetensorsCheckpoint(CheckpointFiles.single(path)) as checkpoint:
        assert checkpoint.info("cube").shape == (7, 5, 3)
        assert torch.equal(checkpoint.read("cube"), cube)
        assert checkpoint.read("scalar").item() == 3.0
        assert checkpoint.read("empty").shape == (0, 3)
        for slices in (
            [slice(1, 3)],
            [slice(None), slice(2, 4)],
            [slice(1, 2), slice(1, 5), slice(0, 2)],
            [slice(None), slice(None), slice(1, 2)],
            [slice(-2, None), slice(0, 0)],
        ):
            assert torch.equal(checkpoint.read_slice("cube", slices), cube[tuple(slices)]), slices
        with pytest.raises(ValueError, match="steps of 1"):
            checkpoint.read_slice("cube", [slice(0, 4, 2)])
        with pytest.raises(CheckpointError, match="no tensor 'nothing'"):
            checkpoint.read("nothing")
        converted = torch.zeros(7, 5, 3, dtype=torch.bfloat16)
        checkpoint.read_into("cube", converted)
        assert torch.equal(converted, cube.bfloat16())
        transposed = torch.zeros(3, 5, 7).permute(2, 1, 0)
        checkpoint.read_into("cube", transposed)
        assert torch.equal(transposed, cube)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_dtype(save: Callable[..., Path], dtype: torch.dtype) -> None:
    raw = torch.arange(64, dtype=torch.uint8)
    tensor = raw.view(dtype) if dtype is not torch.bool else raw % 2 == 1
    with SafetensorsCheckpoint(CheckpointFiles.single(save({"t": tensor}))) as checkpoint:
        found = checkpoint.read("t")
    assert found.dtype == dtype
    assert torch.equal(found.view(torch.uint8), tensor.view(torch.uint8))
