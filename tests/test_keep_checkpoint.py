"""Checkpoints whose workers are threads of one process: what is written, what is read, and what damage looks like."""

import json
import shutil
import tempfile
import threading
import zlib
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors import safe_open
from safetensors.torch import load_file

from lockstep.errors import CheckpointError, UsageError, WorkerLost
from lockstep.keep import HostMemory, Piece, coordination, export, open_checkpoint, tensor_file, write, write_async
from lockstep.keep.folder import SaveFolder


class Threads:
    """A world whose workers are threads; `run(function)` calls `function(world, rank)` on each."""

    def __init__(self, size):
        self.size, self._gate, self._slots, self._local = (
            size,
            threading.Barrier(size),
            [None] * size,
            threading.local(),
        )

    @property
    def rank(self):
        return self._local.rank

    def gather_json(self, obj):
        self._slots[self.rank] = obj
        self._gate.wait(30)
        found = list(self._slots)
        self._gate.wait(30)
        return found

    def barrier(self):
        self.gather(None)

    def run(self, function):
        def enter(rank):
            self._local.rank = rank
            return function(self, rank)

        with ThreadPoolExecutor(self.size) as workers:
            return [future.result() for future in [workers.submit(enter, rank) for rank in range(self.size)]]


class Alone:
    rank, size = 0, 1

    def gather_json(self, obj):
        return [obj]

    def barrier(self):
        pass


def save(folder, step, tensors=None, tree=None, **options):
    tensors = {"x": torch.full((4,), float(step)), "y": torch.arange(6).reshape(2, 3)} if tensors is None else tensors
    pieces = [Piece.whole(name, tensor) for name, tensor in tensors.items()]
    return write(
        folder, step=step, pieces=pieces, tree={"step": step} if tree is None else tree, world=Alone(), **options
    )


def names(folder):
    return sorted(path.name for path in Path(folder).iterdir())


DATA, MANIFEST = "worker-00000-of-00001.safetensors", "manifest.json"


def spoil_flip(path, at):
    content = bytearray(path.read_bytes())
    content[at] ^= 0x10
    path.write_bytes(content)


# Writing and reading


def test_a_checkpoint_and_its_files(tmp_path):
    tree = {"lr": 0.1, "best": float("inf"), "name": "é", "list": [None, True, {}]}
    path = save(tmp_path / "new" / "run", 7, tree=tree)
    assert path == tmp_path / "new" / "run" / "step-000000007"
    assert names(path.parent) == ["step-000000007"]
    assert names(path) == ["manifest.json", "worker-00000-of-00001.safetensors"]
    manifest = json.loads((path / "manifest.json").read_text())
    assert manifest["format"] == "lockstep checkpoint" and manifest["step"] == 7 and manifest["world_size"] == 1
    assert manifest["tensors"]["y"] == {
        "shape": [2, 3],
        "dtype": "int64",
        "pieces": [{"file": "worker-00000-of-00001.safetensors", "key": "y", "begin": 0, "numel": 6}],
    }
    content = (path / "worker-00000-of-00001.safetensors").read_bytes()
    assert manifest["files"] == {
        "worker-00000-of-00001.safetensors": {"bytes": len(content), "crc32": f"{zlib.crc32(content):08x}"}
    }
    for where in (path.parent, path):
        with open_checkpoint(where) as checkpoint:
            assert checkpoint.step == 7 and checkpoint.tree == tree and checkpoint.world_size == 1
            assert checkpoint.tensors["y"].shape == (2, 3) and checkpoint.tensors["y"].dtype == torch.int64
            assert torch.equal(checkpoint.read_whole("y"), torch.arange(6).reshape(2, 3))
            out = torch.zeros(3, dtype=torch.int64)
            assert checkpoint.read("y", 2, 5, out=out) is out and out.tolist() == [2, 3, 4]
            spread = torch.zeros(6, dtype=torch.int64)[::2]
            checkpoint.read("y", 2, 5, out=spread)
            assert spread.tolist() == [2, 3, 4]
            for wrong in (torch.zeros(3), torch.zeros(4, dtype=torch.int64)):
                with pytest.raises(UsageError, match="needs out="):
                    checkpoint.read("y", 2, 5, out=wrong)
            with pytest.raises(UsageError, match="elements 2 to 7 do not exist"):
                checkpoint.read("y", 2, 7)
            with pytest.raises(UsageError, match="no tensor 'z'; it has 'x', 'y'"):
                checkpoint.read_whole("z")


@st.composite
def cut_tensors(draw):
    """(workers, {name: tensor}, [(worker, piece)]) with every tensor cut at random and dealt out at random."""
    workers = draw(st.integers(1, 4))
    tensors, dealt = {}, []
    for number in range(draw(st.integers(0, 4))):
        shape = tuple(draw(st.lists(st.integers(0, 5), max_size=3)))
        dtype = draw(st.sampled_from([torch.float32, torch.bfloat16, torch.int64, torch.bool, torch.complex64]))
        tensor = torch.randn(shape).to(dtype)
        numel = tensor.numel()
        cuts = sorted(draw(st.sets(st.integers(0, numel), max_size=5)) | {0, numel})
        for begin, end in zip(cuts, cuts[1:] if numel else [0], strict=False):
            piece = Piece(f"t{number}", shape, begin, tensor.reshape(-1)[begin:end])
            dealt.append((draw(st.integers(0, workers - 1)), piece))
        tensors[f"t{number}"] = tensor
    return workers, tensors, draw(st.permutations(dealt))


@settings(deadline=None, max_examples=25)
@given(cut_tensors(), st.booleans(), st.randoms(use_true_random=False))
def test_any_cut_over_any_workers_is_read_in_any_ranges(cut, is_async, draw):
    workers, tensors, dealt = cut
    with tempfile.TemporaryDirectory() as folder:

        def worker(world, rank):
            mine = {"pieces": [piece for owner, piece in dealt if owner == rank], "tree": [], "world": world}
            return write_async(folder, step=1, **mine).wait() if is_async else write(folder, step=1, **mine)

        assert len(set(Threads(workers).run(worker))) == 1
        assert names(folder) == ["step-000000001"]
        with open_checkpoint(folder) as checkpoint:
            assert checkpoint.tensors.keys() == tensors.keys()
            for name, tensor in tensors.items():
                assert torch.equal(checkpoint.read_whole(name), tensor)
                for _ in range(3):
                    begin, end = sorted(draw.randint(0, tensor.numel()) for _ in range(2))
                    assert torch.equal(checkpoint.read(name, begin, end), tensor.reshape(-1)[begin:end])
            if tensors:
                export(checkpoint, Path(folder) / "all.safetensors")
                exported = load_file(Path(folder) / "all.safetensors")
                assert all(torch.equal(exported[name], tensor) for name, tensor in tensors.items())


@pytest.mark.parametrize(
    ("pieces", "text"),
    [
        ([[(0, 3)], [(4, 8)]], "elements 3 to 4 are missing"),
        ([[(0, 5)], [(4, 8)]], "elements 4 to 5 are there twice"),
        ([[(0, 8)], [(0, 8)]], "elements 0 to 8 are there twice"),
        ([[(0, 4)], [(4, 7)]], "elements 7 to 8 are missing"),
        ([[(2, 4)], [(4, 8)]], "elements 0 to 2 are missing"),
        ([[], [(0, 0)]], "elements 0 to 8 are missing"),
    ],
)
@pytest.mark.parametrize("is_async", [False, True])
def test_gaps_and_overlaps_name_the_tensor(tmp_path, pieces, text, is_async):
    save(tmp_path, 1)

    def worker(world, rank):
        mine = [Piece("w", (2, 4), begin, torch.arange(begin, end)) for begin, end in pieces[rank]]
        with pytest.raises(CheckpointError, match=rf"tensor 'w' of shape \(2, 4\): {text}") as caught:
            if is_async:
                write_async(tmp_path, step=2, pieces=mine, tree=None, world=world).wait()
            else:
                write(tmp_path, step=2, pieces=mine, tree=None, world=world)
        return str(caught.value)

    assert len(set(Threads(2).run(worker))) == 1
    assert names(tmp_path) == ["step-000000001"]


def test_workers_that_disagree_hear_the_same_error_before_anything_is_written(tmp_path):
    def attempt(text, error=UsageError, **options):
        def worker(world, rank):
            mine = {"step": 1, "pieces": [], "tree": {}, "world": world} | {k: v(rank) for k, v in options.items()}
            for function in (write, write_async):
                with pytest.raises(error, match=text):
                    function(tmp_path / "run", **mine)

        Threads(3).run(worker)
        assert not (tmp_path / "run").exists() or not names(tmp_path / "run")

    attempt("worker 0 saves step 0 and worker 1 step 1", step=lambda rank: rank)
    attempt("worker 2 saves another tree", tree=lambda rank: {"a": rank == 2})
    attempt(r"worker 1: tree\['a'\] is a set", tree=lambda rank: {"a": {1} if rank else 1})
    attempt(
        "worker 2: the piece of 'x' has shape",
        pieces=lambda rank: [Piece("x", (1, 1), 0, torch.ones(1, 1))][: rank // 2],
    )
    attempt(
        "worker 0: the piece of 'x' holds elements 3 to 5", pieces=lambda rank: [Piece("x", (4,), 3, torch.ones(2))]
    )
    attempt("worker 0: a tensor cannot be named", pieces=lambda rank: [Piece.whole("__metadata__", torch.ones(2))])
    attempt("both be called 'x@0'", pieces=lambda rank: [Piece("x", (4,), 0, torch.ones(2))] * 2)
    attempt(
        "worker 0: 'x' is torch.complex128",
        pieces=lambda rank: [Piece.whole("x", torch.ones(2, dtype=torch.complex128))],
    )
    attempt(
        "worker 0: the pieces of 'x' are of .*float32.* and of .*float64",
        pieces=lambda rank: [
            Piece("x", (4,), 2 * n, torch.ones(2, dtype=d)) for n, d in enumerate((torch.float32, torch.float64))
        ],
    )
    attempt("step=-1", step=lambda rank: -1)
    attempt("keep_last=0", keep_last=lambda rank: 0)


def test_a_folder_that_is_not_shared(tmp_path):
    class Apart(Threads):
        """Worker 1 is on another host, where the folder of the save does not exist."""

        def gather_json(self, obj):
            found = super().gather_json(obj)
            elsewhere = isinstance(found[0], list) and self.rank == 1  # The folder that worker 0 has made is first.
            return [["/elsewhere/run", *found[0][1:]], *found[1:]] if elsewhere else found

    def worker(world, rank):
        with pytest.raises(CheckpointError, match=r"worker 1 does not see .* storage that all workers share"):
            write(tmp_path, step=1, pieces=[], tree=None, world=world)

    Apart(2).run(worker)
    assert names(tmp_path) == []


def test_a_relative_folder_stays_where_it_was(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    saving = write_async("run", step=1, pieces=[], tree=None, world=Alone())
    monkeypatch.chdir("/")
    assert saving.wait() == tmp_path / "run" / "step-000000001"


def test_pieces_that_differ_in_kind(tmp_path):
    def worker(world, rank):
        piece = Piece("w", (4,), 2 * rank, torch.ones(2, dtype=torch.float32 if rank else torch.float64))
        with pytest.raises(CheckpointError, match=r"do not make the tensor 'w': .* of torch\.float32"):
            write(tmp_path, step=2, pieces=[piece], tree=None, world=world)

    Threads(2).run(worker)


# Several checkpoints


def test_keep_last_and_saving_a_step_again(tmp_path):
    for step in (1, 2, 3):
        save(tmp_path, step)
    save(tmp_path, 3, {"x": torch.zeros(1)})
    with open_checkpoint(tmp_path) as checkpoint:
        assert checkpoint.step == 3 and checkpoint.tensors.keys() == {"x"}
    save(tmp_path, 4, keep_last=2)
    assert names(tmp_path) == ["step-000000003", "step-000000004"]
    save(tmp_path, 2, keep_last=1)
    assert names(tmp_path) == ["step-000000002", "step-000000003", "step-000000004"], (
        "later steps are not ours to delete"
    )


def test_leftovers_go_and_the_rest_stays(tmp_path):
    save(tmp_path, 1)
    for leftover in (".saving-step-000000002-0123456789abcdef/parts", ".removed-0123456789abcdef"):
        (tmp_path / leftover).mkdir(parents=True)
    (tmp_path / ".saving-mine").mkdir()
    (tmp_path / "notes").mkdir()
    other = SaveFolder.make(tmp_path, 9)
    save(tmp_path, 3)
    assert names(tmp_path) == sorted([other.path.name, ".saving-mine", "notes", "step-000000001", "step-000000003"])
    other.close()


def test_half_a_replacement_is_readable_and_undone(tmp_path):
    save(tmp_path, 1)
    former = tmp_path / ".replaced-step-000000001"
    (tmp_path / "step-000000001").rename(former)
    for where in (tmp_path, tmp_path / "step-000000001"):
        with open_checkpoint(where) as checkpoint:
            assert checkpoint.step == 1 and checkpoint.path == former
    save(tmp_path, 2)
    assert names(tmp_path) == ["step-000000001", "step-000000002"]
    shutil.copytree(tmp_path / "step-000000001", former)
    save(tmp_path, 2)
    assert names(tmp_path) == ["step-000000001", "step-000000002"]


def test_a_checkpoint_can_be_copied_to_another_name(tmp_path):
    save(tmp_path, 1).rename(tmp_path / "best")
    assert open_checkpoint(tmp_path / "best").step == 1


def test_a_link_in_the_place_of_a_checkpoint_is_not_followed(tmp_path):
    save(tmp_path, 1)
    save(tmp_path / "elsewhere", 2).rename(tmp_path / "foreign")
    (tmp_path / "step-000000002").symlink_to(tmp_path / "foreign")
    for where in (tmp_path, tmp_path / "step-000000002"):
        with pytest.raises(CheckpointError, match="step-000000002 is a link"):
            open_checkpoint(where)
    with pytest.warns(UserWarning, match="is a link.* Falling back to step-000000001"):
        assert open_checkpoint(tmp_path, fall_back=True).step == 1
    save(tmp_path, 2)
    save(tmp_path, 3, keep_last=1)
    assert names(tmp_path) == ["elsewhere", "foreign", "step-000000003"] and len(names(tmp_path / "foreign")) == 2


def test_nothing_to_open(tmp_path):
    with pytest.raises(CheckpointError, match="has no checkpoint"):
        open_checkpoint(tmp_path)
    with pytest.raises(CheckpointError, match=r"nowhere cannot be opened .*No such file"):
        open_checkpoint(tmp_path / "nowhere")
    (tmp_path / "file").write_text("")
    with pytest.raises(CheckpointError, match=r"file cannot be opened .*Not a directory"):
        open_checkpoint(tmp_path / "file")
    with pytest.raises(CheckpointError, match=r"manifest\.json cannot be read"):
        open_checkpoint(tmp_path / "step-000000001")


# Beside training


def test_async_saves_what_was_there_and_reuses_its_memory(tmp_path):
    memory, param = HostMemory(), torch.zeros(1000)
    addresses = set()
    for step in range(3):
        param.fill_(step)
        saving = write_async(
            tmp_path, step=step, pieces=[Piece.whole("p", param)], tree=step, world=Alone(), memory=memory
        )
        param.fill_(-1)
        addresses.add(memory._buffers["p", 0].data_ptr())
        assert saving.step == step
    assert saving.wait() == tmp_path / "step-000000002" and saving.done()
    assert len(addresses) == 1
    for step in range(3):
        assert open_checkpoint(tmp_path / f"step-{step:09d}").read_whole("p").unique().tolist() == [step]


def test_async_failure_is_raised_by_wait_or_warned_of(tmp_path, monkeypatch):
    def full(*args):
        raise OSError(28, "No space left on device", "some/file")

    monkeypatch.setattr(tensor_file, "write", full)
    memory = HostMemory()
    saving = write_async(tmp_path, step=1, pieces=[], tree=None, world=Alone(), memory=memory)
    with pytest.raises(CheckpointError, match="worker 0 could not write some/file: No space left on device"):
        saving.wait()
    saving = write_async(tmp_path, step=2, pieces=[], tree=None, world=Alone(), memory=memory)
    thread = saving._thread
    with pytest.warns(UserWarning, match=r"step 2 was not written.*No space left"):
        del saving
        thread.join()
    assert names(tmp_path) == []
    monkeypatch.undo()
    write_async(tmp_path, step=3, pieces=[], tree=None, world=Alone(), memory=memory).wait()
    assert names(tmp_path) == ["step-000000003"]


def test_a_silent_worker_is_named(tmp_path, monkeypatch):
    """Worker 1's thread dies without a word, as if its process had."""
    leave = coordination.Letters._leave
    monkeypatch.setattr(
        coordination.Letters, "_leave", lambda self, report: leave(self, report) if report.rank != 1 else exit()
    )

    def worker(world, rank):
        piece = Piece("x", (3,), rank, torch.ones(1))
        saving = write_async(tmp_path, step=1, pieces=[piece], tree=None, world=world, patience=timedelta(seconds=0.3))
        silence = "worker 1 has not reported its part, and nothing has happened for"
        with pytest.raises(SystemExit) if rank == 1 else pytest.raises(CheckpointError, match=silence):
            saving.wait()

    Threads(3).run(worker)
    assert names(tmp_path) == []


def test_a_worker_lost_in_mid_save_leaves_nothing(tmp_path):
    """A collective fails, as it does when a peer is gone: the first one, the second, ..."""
    for number in range(4):
        lost = Alone()
        left = number

        def gather_json(obj):
            nonlocal left
            left -= 1
            if left < 0:
                raise WorkerLost("worker 1 ended")
            return [obj]

        lost.gather_json = gather_json
        with pytest.raises(WorkerLost):
            write(tmp_path, step=1, pieces=[], tree=None, world=lost)
        # The last collective tells the others of a checkpoint that stands already.
        assert names(tmp_path) == (["step-000000001"] if number == 3 else [])


# Export


def test_export_strips_the_prefix(tmp_path):
    tensors = {"model.a": torch.randn(3, 4), "model.b": torch.tensor(1), "optimizer.a": torch.randn(3, 4)}
    with open_checkpoint(save(tmp_path / "run", 1, tensors)) as checkpoint:
        path = export(checkpoint, tmp_path / "model.safetensors", prefix="model.")
        export(checkpoint, path, prefix="model.")
        exported = load_file(path)
        assert exported.keys() == {"a", "b"} and safe_open(path, "pt").metadata() == {"format": "pt"}
        assert torch.equal(exported["a"], tensors["model.a"]) and exported["b"].shape == ()
        with pytest.raises(UsageError, match="start with 'nothing'"):
            export(checkpoint, path, prefix="nothing")
        with pytest.raises(CheckpointError, match=r"could not write .*nowhere.*No such file"):
            export(checkpoint, tmp_path / "nowhere" / "x.safetensors")
        assert names(tmp_path) == ["model.safetensors", "run"]


def test_the_files_can_be_read_as_the_docs_say(tmp_path, monkeypatch):
    docs = (Path(__file__).parent.parent / "docs" / "checkpoints.md").read_text()
    code = docs[docs.index("import json, torch") :].split("```")[0]
    weight = torch.randn(10, 64)
    halves = [Piece("model.head.weight", (10, 64), 320 * rank, weight.view(-1)[320 * rank :][:320]) for rank in (0, 1)]
    monkeypatch.chdir(tmp_path)
    Threads(2).run(lambda world, rank: write("run", step=100, pieces=[halves[rank]], tree=None, world=world))
    found = {}
    exec(code, found)
    assert torch.equal(found["weight"], weight)


def test_export_of_damage_leaves_the_former_file(tmp_path):
    folder = save(tmp_path / "run", 1)
    (tmp_path / "x.safetensors").write_text("former")
    spoil_flip(folder / DATA, -1)
    with pytest.raises(CheckpointError, match="is damaged"):
        export(open_checkpoint(folder), tmp_path / "x.safetensors")
    assert names(tmp_path) == ["run", "x.safetensors"] and (tmp_path / "x.safetensors").read_text() == "former"
