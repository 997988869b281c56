import json
import random

import numpy as np
import pytest
import torch

from lockstep.errors import CheckpointError, UsageError
from lockstep.keep import safetensors
from lockstep.keep.safetensors import DTYPES, SafetensorsFile


def of_dtype(dtype, *shape):
    """Random bits, so that every pattern of a dtype is met; booleans are 0 or 1."""
    numel = int(np.prod(shape, dtype=int))
    bits = torch.randint(0, 2 if dtype == torch.bool else 256, (numel * dtype.itemsize,), dtype=torch.uint8)
    return bits.view(dtype).reshape(shape)


def bits(tensor):
    return tensor.contiguous().reshape(-1).view(torch.uint8).tolist()


def everything():
    tensors = {f"of.{name}": of_dtype(dtype, 3, 5) for name, dtype in DTYPES.items()}
    tensors |= {"scalar": torch.tensor(2.5), "empty": torch.empty(0, 4), "also empty": torch.empty(2, 0)}
    tensors |= {
        "transposed": torch.arange(12.0).reshape(3, 4).T,
        "conjugate": torch.randn(3, dtype=torch.complex64).conj(),
    }
    return tensors | {"ünïcode \n": torch.ones(2, requires_grad=True)}


def test_what_is_written_is_read(tmp_path):
    tensors = everything()
    written = safetensors.write(tmp_path / "a.safetensors", tensors, {"note": "é"})
    with SafetensorsFile(tmp_path / "a.safetensors") as file:
        assert file.metadata == {"note": "é"}
        assert file.tensors.keys() == tensors.keys()
        for name, tensor in tensors.items():
            back = file.read_whole(name)
            assert (back.dtype, back.shape) == (tensor.dtype, tensor.shape)
            assert bits(back) == bits(tensor.detach().resolve_conj())
        assert (file.num_bytes, file.crc32()) == (written.num_bytes, written.crc32)
        for spec in file.tensors.values():
            assert (file._data_begin + spec.offset) % spec.dtype.itemsize == 0


def test_ranges_and_out(tmp_path):
    tensor = torch.arange(1000)
    safetensors.write(tmp_path / "a.safetensors", {"x": tensor})
    with SafetensorsFile(tmp_path / "a.safetensors") as file:
        out = torch.zeros(10, dtype=torch.int64)
        assert file.read("x", 5, 15, out=out) is out
        assert out.tolist() == list(range(5, 15))
        assert file.read("x", 1000).numel() == 0
        with pytest.raises(UsageError, match="1000 elements"):
            file.read("x", 5, 1001)


def test_larger_than_a_chunk_and_in_parts(tmp_path, monkeypatch):
    monkeypatch.setattr(safetensors, "CHUNK_BYTES", 1 << 10)
    monkeypatch.setattr(safetensors, "STAGING_BYTES", 1 << 14)
    tensor = torch.randn(100_003)
    one = safetensors.write(tmp_path / "one", {"x": tensor})
    specs = {"x": safetensors.Spec(tensor.dtype, tuple(tensor.shape))}
    two = safetensors.write_streamed(tmp_path / "two", specs, lambda name: tensor.split(777))
    assert one == two
    with SafetensorsFile(tmp_path / "two") as file:
        assert torch.equal(file.read_whole("x"), tensor)


def test_the_reference_implementation_agrees(tmp_path):
    reference = pytest.importorskip("safetensors.torch")
    from safetensors import safe_open

    tensors = {name: tensor for name, tensor in everything().items() if name != "of.F8_E8M0"}
    safetensors.write(tmp_path / "ours.safetensors", tensors, {"format": "pt"})
    theirs = reference.load_file(tmp_path / "ours.safetensors")
    assert theirs.keys() == tensors.keys()
    with safe_open(tmp_path / "ours.safetensors", "pt") as opened:
        assert opened.metadata() == {"format": "pt"}
    for name, tensor in tensors.items():
        assert bits(theirs[name]) == bits(tensor.detach().resolve_conj())
    plain = {name: tensor.detach().resolve_conj().contiguous() for name, tensor in tensors.items()}
    reference.save_file(plain, tmp_path / "theirs.safetensors")
    with SafetensorsFile(tmp_path / "theirs.safetensors") as file:
        assert all(bits(file.read_whole(name)) == bits(tensor) for name, tensor in plain.items())


def test_dtypes_without_a_name_are_refused(tmp_path):
    with pytest.raises(UsageError, match=r"'x' is torch.complex128.*view_as_real"):
        safetensors.write(tmp_path / "a", {"x": torch.zeros(2, dtype=torch.complex128)})
    assert not (tmp_path / "a").exists()


def test_every_truncation_is_named(tmp_path):
    path = tmp_path / "a.safetensors"
    safetensors.write(path, {"x": torch.arange(6), "y": torch.ones(3)})
    whole = path.read_bytes()
    for length in range(len(whole)):
        path.write_bytes(whole[:length])
        with pytest.raises(CheckpointError, match=r"a\.safetensors is damaged"):
            SafetensorsFile(path)
    path.write_bytes(whole + b"x")
    with pytest.raises(CheckpointError, match="should have"):
        SafetensorsFile(path)


def test_a_file_cut_while_open(tmp_path):
    path = tmp_path / "a.safetensors"
    safetensors.write(path, {"x": torch.arange(6)})
    with SafetensorsFile(path) as file:
        path.write_bytes(path.read_bytes()[:-1])
        with pytest.raises(CheckpointError, match="1 bytes too early"):
            file.read("x")


GOOD = {"dtype": "I64", "shape": [2], "data_offsets": [0, 16]}


@pytest.mark.parametrize(
    "header",
    [
        b"\xff\xfe",
        b"nonsense",
        b"[1]",
        b"3",
        b'{"x": 1}',
        b'{"x": ' + b"[" * 5000,
        b'{"x": {"dtype": "I64", "shape": [2], "data_offsets": [0, 16]}, "x": {}}',
        *(
            json.dumps(wrong).encode()
            for wrong in (
                {},
                {"x": GOOD | {"dtype": "F7"}},
                {"x": GOOD | {"dtype": "F32"}},
                {"x": GOOD | {"shape": [3]}},
                {"x": GOOD | {"shape": [-2]}},
                {"x": GOOD | {"shape": ["2"]}},
                {"x": GOOD | {"shape": [2.0]}},
                {"x": GOOD | {"data_offsets": [8, 24]}},
                {"x": GOOD | {"data_offsets": [0]}},
                {"x": GOOD, "y": GOOD},
                {"x": GOOD, "__metadata__": {"a": 1}},
                {"x": GOOD, "__metadata__": 7},
            )
        ),
    ],
)
def test_wrong_headers_are_named(tmp_path, header):
    path = tmp_path / "a.safetensors"
    path.write_bytes(len(header).to_bytes(8, "little") + header + b"\0" * 16)
    with pytest.raises(CheckpointError, match=r"a\.safetensors is damaged or of another kind"):
        SafetensorsFile(path)


def test_a_huge_header_length_allocates_nothing(tmp_path):
    path = tmp_path / "a.safetensors"
    path.write_bytes((1 << 62).to_bytes(8, "little") + b"{}")
    with pytest.raises(CheckpointError, match="header would take"):
        SafetensorsFile(path)


def test_flipped_bits_never_escape_as_another_error(tmp_path):
    path = tmp_path / "a.safetensors"
    safetensors.write(path, {"x": torch.arange(6), "y": torch.ones(3)}, {"a": "b"})
    whole = path.read_bytes()
    draw = random.Random(0)
    for _ in range(500):
        spoilt = bytearray(whole)
        spoilt[draw.randrange(200)] ^= 1 << draw.randrange(8)
        path.write_bytes(spoilt)
        try:
            with SafetensorsFile(path) as file:
                for name in file.tensors:
                    file.read_whole(name)
        except CheckpointError as error:
            assert str(path) in str(error)


def test_a_missing_file_is_named(tmp_path):
    with pytest.raises(CheckpointError, match="nowhere cannot be opened: No such file"):
        SafetensorsFile(tmp_path / "nowhere")
