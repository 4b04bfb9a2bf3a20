"""A file of a stranger decides no place: opening it deletes, writes, imports and starts nothing."""

from __future__ import annotations

import importlib
import inspect
import os
import sys
from contextlib import closing, suppress
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from factories import objects
from tensordict import NonTensorData, TensorDict
from torchrl.data import LazyMemmapStorage, LazyTensorStorage, TensorDictReplayBuffer
from torchrl.data.replay_buffers.samplers import Sampler
from torchrl.data.replay_buffers.storages import Storage
from torchrl.data.replay_buffers.writers import Writer
from torchrl.envs import EnvBase, Transform

import gfn_rb
from gfn_rb import (
    RaggedStorage,
    RowMemmapStorage,
    fifo_buffer,
    open_buffer,
    reward_prioritized_buffer,
    save_checkpoint,
    view,
)
from gfn_rb.arguments import KeepsArguments
from gfn_rb.checkpoint import Journal
from gfn_rb.checkpoint.description import ALLOWED, ELSEWHERE, description_of
from gfn_rb.envs import BayesianDAG
from gfn_rb.errors import CheckpointError
from gfn_rb.interop.torch_files import read_torch_file
from gfn_rb.storages.tensors import RowTensorStorage
from gfn_rb.training.cli import main


@pytest.fixture
def target(tmp_path):
    """A folder that a file has no business with, and a look at it afterwards."""
    folder = tmp_path / "target"
    (folder / "inner").mkdir(parents=True)
    for name in ("precious.txt", "state.memmap", "inner/meta.json"):
        (folder / name).write_text("precious")
    yield folder
    assert_untouched(folder)


def assert_untouched(folder: Path) -> None:
    found = {path.relative_to(folder).as_posix() for path in folder.rglob("*")}
    assert found == {"precious.txt", "state.memmap", "inner", "inner/meta.json"}
    for name in found - {"inner"}:
        assert (folder / name).read_text() == "precious"


def described(kind: Any, **arguments: Any) -> dict[str, Any]:
    path = kind if isinstance(kind, str) else f"{kind.__module__}:{kind.__qualname__}"
    return {"class": path, "arguments": arguments}


def a_file(path: Path, kind: str, changes: Any, monkeypatch) -> Path:
    """A checkpoint, a journal or a run folder, whose description was changed."""
    rb = fifo_buffer(4)
    made = changes(description_of(rb))
    monkeypatch.setattr("gfn_rb.checkpoint.buffers.description_of", lambda _: made)
    if kind == "journal":
        with closing(Journal(rb, path)):
            rb.extend(objects([1, 2]))
    else:
        rb.extend(objects([1, 2]))
        if kind == "run":
            path.mkdir()
            (path / "config.json").write_text('{"env": "hypergrid"}')
        save_checkpoint(path / "checkpoint.gfnrb" if kind == "run" else path, rb)
    monkeypatch.undo()
    return path


def with_argument(name: str, value: Any) -> Any:
    def changed(description):
        return {**description, "arguments": {**description["arguments"], name: value}}

    return changed


PLACES = {
    "memmap": (RowMemmapStorage, "gfn_rb.storages.memmaps:RowMemmapStorage"),
    "torchrl": (LazyMemmapStorage, "gfn_rb.storages.memmaps:LazyMemmapStorage"),
}


@pytest.mark.parametrize("kind", ["checkpoint", "journal", "run"])
@pytest.mark.parametrize("cleanup", [True, False])
@pytest.mark.parametrize("name", PLACES)
def test_a_storage_on_disk_is_not_made(name, cleanup, kind, target, tmp_path, monkeypatch, capsys):
    """The advisory: a description with a folder of its choice, which was deleted."""
    _, path = PLACES[name]
    place = {"scratch_dir": str(target), "existsok": True, "auto_cleanup": cleanup}
    storage = described(path, max_size=4, **place)
    file = a_file(tmp_path / "file", kind, with_argument("storage", storage), monkeypatch)
    removed: list[Any] = []  # at the end of the process, if a storage were made
    monkeypatch.setattr("atexit.register", lambda *each, **_: removed.append(each))
    with pytest.raises(CheckpointError, match=r"MemmapStorage is no part of a buffer"):
        open_buffer(file)
    assert main(["inspect", str(file)]) == 0
    assert "is no part of a buffer" in capsys.readouterr().out
    assert not removed
    assert_untouched(target)


def test_rows_of_a_file_are_read_into_memory(tmp_path):
    for storage in (RowMemmapStorage(4, scratch_dir=tmp_path / "rows"), LazyMemmapStorage(4)):
        rb = reward_prioritized_buffer(4, storage=storage)
        rb.extend(objects([1, 2]))
        save_checkpoint(tmp_path / "rb", rb)
        assert type(open_buffer(tmp_path / "rb").storage) is RowTensorStorage


@pytest.mark.parametrize("name", [*sorted(ELSEWHERE), "nobody_knows_it"])
def test_arguments_that_are_no_business_of_a_file_are_refused(name, tmp_path, monkeypatch):
    for value in (True, "cuda", None):
        file = a_file(tmp_path / "rb", "checkpoint", with_argument(name, value), monkeypatch)
        for trust in (False, True):
            with pytest.raises(CheckpointError, match=f"takes no {name} from a file"):
                open_buffer(file, trust=trust)


def test_shared_memory_is_not_taken_from_a_file(tmp_path):
    rb = reward_prioritized_buffer(4, shared=True)
    rb.extend(objects([1, 2]))
    save_checkpoint(tmp_path / "rb", rb)
    assert not open_buffer(tmp_path / "rb").shared


# All classes that a path may lead to.


def subclasses(kind: type) -> set[type]:
    return {each for sub in kind.__subclasses__() for each in (sub, *subclasses(sub))}


def everything() -> None:
    root = Path(gfn_rb.__path__[0])
    for file in sorted(root.rglob("*.py")):
        name = ".".join(file.relative_to(root.parent).with_suffix("").parts)
        if not {"torchgfn", "mpi", "__init__"} & {*name.split(".")}:  # which need other packages
            importlib.import_module(name)


def own_classes() -> dict[str, type]:
    everything()
    kinds = {f"{each.__module__}:{each.__qualname__}": each for each in subclasses(KeepsArguments)}
    return {path: each for path, each in kinds.items() if path.startswith("gfn_rb.")}


# Bases that nobody makes, parts of a whole that makes them, and what needs an object of others.
NOT_MADE = {
    "gfn_rb.buffers.merged_sampler:MergedSampler", "gfn_rb.buffers.readable:Readable",
    "gfn_rb.buffers.transforms:RowTransform", "gfn_rb.envs.base:GFNEnv",
    "gfn_rb.envs.continuous:ContinuousEnv", "gfn_rb.envs.diffusion:DiffusionEnv",
    "gfn_rb.envs.enumerable:EnumerableEnv", "gfn_rb.envs.grid:GridEnv",
    "gfn_rb.envs.interface:TorchRLInterface", "gfn_rb.envs.scored_sequences:ScoredSequenceEnv",
    "gfn_rb.envs.sequence:SequenceEnv",
    "gfn_rb.samplers.base:KeySampler", "gfn_rb.samplers.ranked:RankSampler",
    "gfn_rb.storages.state_folder:StateInFolder", "gfn_rb.storages.tensors:EncodedStorage",
    "gfn_rb.writers.cells:Cells",
}  # fmt: skip
# Arguments that a buffer passes to classes of TorchRL, or that environments pass on.
MORE = {"batch_size", "transform", "storage", "writer", "sampler", "priority_key", "prefetch"}


def test_the_list_has_each_class_and_each_of_its_arguments():
    known = own_classes()
    own = {path for path in ALLOWED if path.startswith("gfn_rb.")}
    known["gfn_rb.storages.tensors:RowTensorStorage"] = RowTensorStorage  # what all others become
    assert own | NOT_MADE == known.keys() - {"gfn_rb.interop.torchgfn.environment:TorchGFNEnv"}
    assert not own & NOT_MADE
    for path in own:
        if known[path] is RowTensorStorage:
            continue
        for name, parameter in inspect.signature(known[path].__init__).parameters.items():
            if parameter.kind is parameter.POSITIONAL_OR_KEYWORD and name != "self":
                assert name in {*ALLOWED[path], *ELSEWHERE}, (path, name)
        assert ELSEWHERE.isdisjoint(ALLOWED[path])


def test_no_other_class_is_made_or_even_imported(tmp_path, monkeypatch):
    everything()
    bases = (Writer, Sampler, Storage, Transform, EnvBase, TensorDictReplayBuffer)
    reachable = {each for base in bases for each in subclasses(base)}
    paths = {f"{each.__module__}:{each.__qualname__}" for each in reachable}
    paths |= {
        f"{module.__name__}:{name}"
        for module in [*sys.modules.values()]
        if getattr(module, "__name__", "").startswith("gfn_rb")
        for name, each in vars(module).items()
        if isinstance(each, type) and each in reachable
    }
    paths |= {
        "gfn_rb.__main__:main",
        "gfn_rb.storages.memmaps:os.system",
        "gfn_rb.storages.tensors:compat.tensors.torch",
    }
    paths |= {"gfn_rb.nowhere:X", "gfn_rb:open_buffer", "gfn_rb.envs:HyperGrid", "", "gfn_rb.", ":"}
    assert len(paths) > 200
    rb = fifo_buffer(4)
    save_checkpoint(tmp_path / "rb", rb)
    states = [{"members": 0, "description": description_of(rb)}]
    resolved = []
    monkeypatch.setattr("pkgutil.resolve_name", lambda path: resolved.append(path))
    from gfn_rb.checkpoint.description import buffer_of

    for path in paths - ALLOWED.keys():
        for node in (described(path), {"environment": path, "arguments": {}}):
            states[0]["description"] = with_argument("storage", node)(description_of(rb))
            with pytest.raises(CheckpointError):
                buffer_of(states, None, False)
    assert resolved
    assert {*resolved} <= ALLOWED.keys()


WATCHED: list[str] | None = None  # what the process does while a file is opened
_PLACE = "a-place-that-no-file-names"
_EFFECTS = "os.", "shutil.", "subprocess.", "socket.", "tempfile.", "urllib.", "pickle.", "open"
_LOOKS = "os.listdir", "os.scandir", "os.walk"


def _watch(event: str, arguments: tuple[Any, ...]) -> None:
    """Note what touches the place, or changes anything but the shared memory of counters."""
    if WATCHED is None:
        return
    text = repr(arguments)
    is_read = event in _LOOKS or (event == "open" and not {*"wax+"} & {*str(arguments[1])})
    changes = event.startswith(_EFFECTS) and not is_read and "/dev/shm" not in text
    if changes or _PLACE in text:
        WATCHED.append(f"{event} {text:.200}")


@pytest.fixture(scope="module")
def _watching():
    sys.addaudithook(_watch)  # which nobody can remove


@pytest.mark.usefixtures("_watching")
@pytest.mark.parametrize("path", sorted(ALLOWED))
def test_no_argument_of_an_allowed_class_is_a_place(path, tmp_path):
    """Each class is made with each argument as text that names a folder."""
    global WATCHED
    from gfn_rb.checkpoint.description import _Maker

    place = str(tmp_path / _PLACE)
    everything()
    values = [place, [place], {"pairs": [[place, place]]}, {"pairs": [["state", place]]}, 3, True]
    usual = {
        "max_size": 4, "storage": described(RowTensorStorage, max_size=4), "key": "log_reward",
        "writer": described("gfn_rb.writers.fifo:FIFOWriter"), "samples_per_insert": 1.0,
        "env": {"environment": "gfn_rb.envs.grid:HyperGrid", "arguments": {"ndim": 2, "height": 3}},
    }  # fmt: skip
    names = {*ALLOWED[path]}
    base = {name: usual[name] for name in usual.keys() & names}
    for name, value in product(sorted(names), values):
        WATCHED = []
        with suppress(Exception):
            _Maker(None, False).value(described(path, **{**base, name: value}))
        found, WATCHED = WATCHED, None
        assert not found, (name, value)


def test_data_of_an_environment_are_recorded_and_no_path_to_them(tmp_path):
    table = tmp_path / "data.csv"
    table.write_text("1,2\n2,1\n3,5\n4,4\n")
    env = BayesianDAG(data=table)
    rb = fifo_buffer(4, compact="narrow", env=env)
    rb.extend(objects([1]).set("state", torch.zeros(1, 2, 2, dtype=torch.int64)))
    save_checkpoint(tmp_path / "rb", rb)
    table.unlink()
    opened = open_buffer(tmp_path / "rb")
    assert torch.equal(opened[:]["state"], rb[:]["state"])


def test_a_path_to_data_is_not_read(tmp_path, monkeypatch):
    table = tmp_path / "data.csv"
    table.write_text("1,2\n2,1\n3,5\n4,4\n")
    path = "gfn_rb.envs.bayesian_dag:BayesianDAG"
    env = {"environment": path, "arguments": {"data": str(table)}}
    transform = [described("gfn_rb.buffers.compact:CompactRows", env=env, states="narrow")]
    file = a_file(tmp_path / "rb", "checkpoint", with_argument("transform", transform), monkeypatch)
    with pytest.raises(CheckpointError, match="data of BayesianDAG is no tensor"):
        open_buffer(file)


def test_a_folder_of_ragged_rows_is_read_without_pickle(tmp_path):
    storage = RaggedStorage(4, {"state": 4})
    rb = fifo_buffer(4, storage=storage)
    rb.extend(objects([1, 2]))
    storage.dumps(tmp_path / "rows")
    rows = TensorDict.load_memmap(tmp_path / "rows").clone()
    rows.set("words", NonTensorData(Evil(str(tmp_path / "ran"))))
    rows.memmap(tmp_path / "evil")
    with pytest.raises(CheckpointError, match=r"cannot read .*evil"):
        RaggedStorage(4, {"state": 4}).loads(tmp_path / "evil")
    assert not (tmp_path / "ran").exists()
    again = RaggedStorage(4, {"state": 4})
    again.loads(tmp_path / "rows")
    assert torch.equal(again.content()["log_reward"], storage.content()["log_reward"])


class Evil:
    def __init__(self, path: str) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return Path.touch, (Path(self.path),)


def test_view_of_a_strangers_buffer_needs_no_place(tmp_path):
    rb = fifo_buffer(4, storage=LazyTensorStorage(4))
    rb.extend(objects([1, 2]))
    save_checkpoint(tmp_path / "rb", rb)
    view(open_buffer(tmp_path / "rb"), tmp_path / "page.html")


def test_a_pipe_is_no_file_of_torch(tmp_path):
    os.mkfifo(tmp_path / "pipe.pt")
    with pytest.raises(CheckpointError, match=r"cannot read .*pipe.pt: Is no regular file"):
        read_torch_file(tmp_path / "pipe.pt")
