import json
import random

import numpy as np
import pytest
import torch
from safetensors import TensorSpec, safe_open
from safetensors.torch import load_file, save_file

from lockstep.errors import CheckpointError, UsageError
from lockstep.keep import tensor_file
from lockstep.keep.tensor_file import DTYPES, Spec, TensorFile


def of_dtype(dtype, *shape):
    """Random bits, so that every pattern of a dtype is met; booleans are 0 or 1."""
    numel = int(np.prod(shape, dtype=int))
    bits = torch.randint(0, 2 if dtype == torch.bool else 256, (numel * dtype.itemsize,), dtype=torch.uint8)
    return bits.view(dtype).reshape(shape)


def bits(tensor):
    return tensor.contiguous().reshape(-1).view(torch.uint8).tolist()


def write(path, tensors, metadata=None):
    specs = {name: Spec(tensor.dtype, tuple(tensor.shape)) for name, tensor in tensors.items()}
    return tensor_file.write(path, specs, lambda name: (tensors[name],), metadata or {})


def read(file, name):
    spec = file.tensors[name]
    out = torch.empty(spec.numel, dtype=spec.dtype)
    file.read(name, 0, spec.numel, out=out)
    return out.reshape(spec.shape)


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
    written = write(tmp_path / "a.safetensors", tensors, {"note": "é"})
    file = TensorFile(tmp_path / "a.safetensors")
    assert file.tensors.keys() == tensors.keys()
    for name, tensor in tensors.items():
        back = read(file, name)
        assert (back.dtype, back.shape) == (tensor.dtype, tensor.shape)
        assert bits(back) == bits(tensor.detach().resolve_conj())
    assert (file.num_bytes, file.crc32()) == written
    assert all(spec.offset % spec.dtype.itemsize == 0 for spec in file.tensors.values())
    file.close()


def test_ranges(tmp_path):
    write(tmp_path / "a.safetensors", {"x": torch.arange(1000)})
    file = TensorFile(tmp_path / "a.safetensors")
    out = torch.zeros(10, dtype=torch.int64)
    file.read("x", 5, 15, out=out)
    assert out.tolist() == list(range(5, 15))
    file.read("x", 1000, 1000, out=out[:0])


def test_larger_than_a_chunk_and_in_parts(tmp_path, monkeypatch):
    monkeypatch.setattr(tensor_file, "CHUNK_BYTES", 1 << 10)
    monkeypatch.setattr(tensor_file, "STAGING_BYTES", 1 << 14)
    tensor = torch.randn(100_003)
    one = write(tmp_path / "one", {"x": tensor})
    specs = {"x": Spec(tensor.dtype, tuple(tensor.shape))}
    assert one == tensor_file.write(tmp_path / "two", specs, lambda name: tensor.split(777), {})
    assert torch.equal(read(TensorFile(tmp_path / "two"), "x"), tensor)


def test_the_library_reads_what_is_written_here_and_the_other_way_round(tmp_path):
    tensors = {name: tensor for name, tensor in everything().items() if name != "of.F8_E8M0"}
    write(tmp_path / "ours.safetensors", tensors, {"format": "pt"})
    theirs = load_file(tmp_path / "ours.safetensors")
    assert theirs.keys() == tensors.keys()
    with safe_open(tmp_path / "ours.safetensors", "pt") as opened:
        assert opened.metadata() == {"format": "pt"}
    for name, tensor in tensors.items():
        assert bits(theirs[name]) == bits(tensor.detach().resolve_conj())
    plain = {name: tensor.detach().resolve_conj().contiguous() for name, tensor in tensors.items()}
    save_file(plain, tmp_path / "theirs.safetensors")
    file = TensorFile(tmp_path / "theirs.safetensors")
    assert all(bits(read(file, name)) == bits(tensor) for name, tensor in plain.items())


def test_dtypes_have_the_library_s_names():
    for name, dtype in DTYPES.items():
        spec = TensorSpec(dtype=str(dtype).removeprefix("torch."), shape=[0], data_ptr=0, data_len=0)
        assert spec.dtype == name


def test_dtypes_without_a_name_are_refused(tmp_path):
    with pytest.raises(UsageError, match=r"'x' is torch.complex128.*view_as_real"):
        write(tmp_path / "a", {"x": torch.zeros(2, dtype=torch.complex128)})
    assert not (tmp_path / "a").exists()


def test_every_truncation_is_named(tmp_path):
    path = tmp_path / "a.safetensors"
    write(path, {"x": torch.arange(6), "y": torch.ones(3)})
    whole = path.read_bytes()
    for length in range(len(whole)):
        path.write_bytes(whole[:length])
        with pytest.raises(CheckpointError, match=r"a\.safetensors is damaged"):
            TensorFile(path)
    path.write_bytes(whole + b"x")
    with pytest.raises(CheckpointError, match="not fully covered"):
        TensorFile(path)


def test_a_file_cut_while_open(tmp_path):
    path = tmp_path / "a.safetensors"
    write(path, {"x": torch.arange(6)})
    file = TensorFile(path)
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(CheckpointError, match="1 bytes too early"):
        read(file, "x")


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
                {"x": GOOD | {"dtype": "F4", "shape": [32]}},
                {"x": GOOD | {"shape": [1 << 40, 1 << 40]}},
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
        TensorFile(path)


def test_a_huge_header_length_allocates_nothing(tmp_path):
    path = tmp_path / "a.safetensors"
    path.write_bytes((1 << 62).to_bytes(8, "little") + b"{}")
    with pytest.raises(CheckpointError, match="header too large"):
        TensorFile(path)


def test_flipped_bits_never_escape_as_another_error(tmp_path):
    path = tmp_path / "a.safetensors"
    write(path, {"x": torch.arange(6), "y": torch.ones(3)}, {"a": "b"})
    whole = path.read_bytes()
    draw = random.Random(0)
    for _ in range(500):
        spoilt = bytearray(whole)
        spoilt[draw.randrange(200)] ^= 1 << draw.randrange(8)
        path.write_bytes(spoilt)
        try:
            file = TensorFile(path)
            for name in file.tensors:
                read(file, name)
            file.close()
        except CheckpointError as error:
            assert str(path) in str(error)


def test_a_missing_file_is_named(tmp_path):
    with pytest.raises(CheckpointError, match="nowhere cannot be opened: No such file"):
        TensorFile(tmp_path / "nowhere")
