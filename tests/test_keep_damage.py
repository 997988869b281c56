"""Files that are not as they were written: found, named, fallen back from."""

import json
import os
import random
import shutil
import zlib

import pytest
import torch
from test_keep_checkpoint import DATA, MANIFEST, save, spoil_flip

from lockstep.errors import CheckpointError
from lockstep.keep import open_checkpoint


def edited(path, **changes):
    """A manifest with other content and the right checksum: damage of the kind that checksums do not find."""
    plain = json.loads(path.read_text())
    del plain["crc32"]
    body = json.dumps(plain | changes, indent=2)[2:]
    path.write_text(f'{{\n  "crc32": "{zlib.crc32(body.encode()):08x}",\n{body}')


DAMAGE = {
    "flipped byte of data": lambda folder: spoil_flip(folder / DATA, -1),
    "flipped byte of a header": lambda folder: spoil_flip(folder / DATA, 20),
    "truncated": lambda folder: os.truncate(folder / DATA, 50),
    "empty": lambda folder: os.truncate(folder / DATA, 0),
    "grown": lambda folder: os.truncate(folder / DATA, 5000),
    "missing": lambda folder: (folder / DATA).unlink(),
    "another file of that size": lambda folder: (folder / DATA).write_bytes(b"x" * (folder / DATA).stat().st_size),
    "no manifest": lambda folder: (folder / MANIFEST).unlink(),
    "flipped byte of the manifest": lambda folder: spoil_flip(folder / MANIFEST, 300),
    "truncated manifest": lambda folder: os.truncate(folder / MANIFEST, 300),
    "empty manifest": lambda folder: os.truncate(folder / MANIFEST, 0),
    "foreign JSON": lambda folder: (folder / MANIFEST).write_text('{"weights": [1, 2]}'),
    "JSON of another kind": lambda folder: (folder / MANIFEST).write_text("[]"),
    "no JSON": lambda folder: (folder / MANIFEST).write_bytes(b"\xff\xfe"),
    "a newer version": lambda folder: edited(folder / MANIFEST, version=2),
    "tensors missing": lambda folder: edited(folder / MANIFEST, tensors=None),
    "a path for a file": lambda folder: edited(
        folder / MANIFEST, files={"../x.safetensors": {"bytes": 1, "crc32": "0"}}
    ),
    "files missing": lambda folder: edited(folder / MANIFEST, files={}),
    "a step that is no number": lambda folder: edited(folder / MANIFEST, step="7"),
    "a step of 70 bits": lambda folder: edited(folder / MANIFEST, step=2**70),
    "a shape of many dimensions": lambda folder: edited(
        folder / MANIFEST, tensors={"x": {"shape": [1] * 10**5, "dtype": "float32", "pieces": []}}
    ),
    "a pipe for the manifest": lambda folder: replaced(folder / MANIFEST, os.mkfifo),
    "an endless manifest": lambda folder: replaced(folder / MANIFEST, lambda path: path.symlink_to("/dev/zero")),
    "a huge manifest": lambda folder: os.truncate(folder / MANIFEST, 1 << 40),
    "a linked manifest": lambda folder: linked(folder / MANIFEST),
    "a linked file": lambda folder: linked(folder / DATA),
    "a pipe for a file": lambda folder: replaced(folder / DATA, os.mkfifo),
    "a file of a terabyte": lambda folder: (
        os.truncate(folder / DATA, 1 << 40),
        edited(folder / MANIFEST, files={DATA: {"bytes": 1 << 40, "crc32": "0"}}),
    ),
}


def replaced(path, make):
    path.unlink()
    make(path)


def linked(path):
    """Somebody else's file in the place of one of ours."""
    elsewhere = path.rename(path.parent.parent / f"elsewhere-{path.name}")
    path.symlink_to(elsewhere)


@pytest.mark.parametrize("damage", DAMAGE)
def test_damage_is_named_and_fallen_back_from(tmp_path, damage):
    save(tmp_path, 1)
    folder = save(tmp_path, 2)
    DAMAGE[damage](folder)
    with pytest.raises(CheckpointError, match=r"step-000000002/(worker-00000-of-00001\.safetensors|manifest\.json) "):
        open_checkpoint(tmp_path).read_whole("x")
    with pytest.warns(UserWarning, match=r"step-000000002/.* Falling back to step-000000001"):
        checkpoint = open_checkpoint(tmp_path, fall_back=True)
    assert checkpoint.step == 1 and checkpoint.read_whole("x").tolist() == [1.0] * 4
    shutil.rmtree(tmp_path / "step-000000001")
    with pytest.raises(CheckpointError, match="step-000000002/"):
        open_checkpoint(tmp_path, fall_back=True)


def test_checksums_can_be_skipped(tmp_path):
    folder = save(tmp_path, 1)
    spoil_flip(folder / DATA, -1)
    (folder / MANIFEST).write_text((folder / MANIFEST).read_text().replace('"step": 1\n', '"step": 5\n'))
    with pytest.raises(CheckpointError, match="edited on purpose"):
        open_checkpoint(tmp_path)
    with open_checkpoint(tmp_path, verify=False) as checkpoint:
        assert checkpoint.tree == {"step": 5}
        checkpoint.read_whole("x")


def test_every_flipped_bit_of_a_manifest_is_found(tmp_path):
    path = save(tmp_path, 1) / MANIFEST
    whole = path.read_bytes()
    for at in range(len(whole)):
        path.write_bytes(whole[:at] + bytes([whole[at] ^ (1 << random.Random(at).randrange(8))]) + whole[at + 1 :])
        with pytest.raises(CheckpointError, match=r"manifest\.json"):
            open_checkpoint(tmp_path)


def test_a_file_of_another_checkpoint(tmp_path):
    one, two = save(tmp_path, 1), save(tmp_path, 2, {"q": torch.ones(4), "y": torch.arange(6).reshape(2, 3)})
    shutil.copy(two / DATA, one / DATA)
    with pytest.raises(CheckpointError, match=r"does not hold what manifest\.json says.*'x'"):
        open_checkpoint(one, verify=False).read_whole("x")
