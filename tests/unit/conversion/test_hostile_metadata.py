"""The table of contents of a Megatron checkpoint from a stranger: plain data that fits its files, or refused."""

from __future__ import annotations

import dataclasses
import io
import os
import pickle
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, Metadata, MetadataIndex

from exgrpo_conversion.errors import ModelFolderError
from exgrpo_conversion.safe_metadata import StoredChunk, StoredTensor, read_metadata
from exgrpo_conversion.stored_tensors import read_tensor

NORM, WEIGHT = "decoder.final_layernorm.weight", "decoder.layers.mlp.linear_fc2.weight"


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    """Two tensors, an object and a state of an optimizer, as torch itself writes them."""
    state = {
        NORM: torch.arange(6, dtype=torch.bfloat16),
        WEIGHT: torch.arange(12.0).view(3, 4),
        "decoder.layers.mlp._extra_state": {"scale": 1},
        "optimizer.state.exp_avg.decoder.final_layernorm.weight": torch.zeros(6),
    }
    dcp.save(state, storage_writer=dcp.FileSystemWriter(tmp_path / "ck"), no_dist=True)
    return tmp_path / "ck"


def edit(folder: Path, change: Callable[[Metadata], object]) -> None:
    path = folder / ".metadata"
    metadata = pickle.loads(path.read_bytes())
    change(metadata)
    path.write_bytes(pickle.dumps(metadata))


def test_the_tensors_are_those_that_torch_finds(checkpoint: Path):
    index = read_metadata(checkpoint)
    reference = dcp.FileSystemReader(checkpoint).read_metadata()
    assert list(index.tensors) == [NORM, WEIGHT]
    assert sorted(index.left_out) == [
        "decoder.layers.mlp._extra_state.scale",
        "optimizer.state.exp_avg.decoder.final_layernorm.weight",
    ]
    for key, tensor in index.tensors.items():
        theirs = reference.state_dict_metadata[key]
        assert (tensor.shape, tensor.dtype) == (tuple(theirs.size), theirs.properties.dtype)
        (chunk,) = tensor.chunks
        place = reference.storage_data[MetadataIndex(key, chunk.offsets)]
        assert (chunk.file.name, chunk.start, chunk.length) == (place.relative_path, place.offset, place.length)
    assert index.tensors[NORM].nbytes == 12  # 6 values of 2 bytes


class _Runs:
    """Unpickled with pickle, it makes a file."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[object, tuple[str]]:
        return os.system, (f"touch {self.path}",)


def test_code_in_the_metadata_is_named_and_does_not_run(checkpoint: Path):
    proof = checkpoint.parent / "ran"
    edit(checkpoint, lambda metadata: setattr(metadata, "planner_data", _Runs(proof)))
    with pytest.raises(ModelFolderError, match=r"\.metadata is refused: it asks for posix\.system"):
        read_metadata(checkpoint)
    assert not proof.exists()
    pickle.loads((checkpoint / ".metadata").read_bytes())
    assert proof.exists()  # the file would have run it


def place(metadata: Metadata, key: str = NORM) -> object:
    return next(info for index, info in metadata.storage_data.items() if index.fqn == key)


def test_a_place_may_not_lead_out_of_the_folder(checkpoint: Path):
    (checkpoint.parent / "outside.distcp").write_bytes(bytes(10_000))
    for name in ("../outside.distcp", "/etc/passwd", "..", "", "a/b.distcp", "a\\b"):
        edit(checkpoint, lambda metadata, name=name: setattr(place(metadata), "relative_path", name))
        with pytest.raises(ModelFolderError, match="only files in the folder itself") as caught:
            read_metadata(checkpoint)
        assert repr(name) in str(caught.value)
        assert NORM in str(caught.value)


def test_a_link_may_not_lead_out_of_the_folder(checkpoint: Path):
    shard = checkpoint / "__0_0.distcp"
    shard.rename(checkpoint.parent / "outside.distcp")
    shard.symlink_to(checkpoint.parent / "outside.distcp")
    with pytest.raises(ModelFolderError, match=r"__0_0\.distcp is a link out of the folder"):
        read_metadata(checkpoint)


def test_a_missing_or_cut_off_file_is_named(checkpoint: Path):
    shard = checkpoint / "__0_0.distcp"
    content = shard.read_bytes()
    shard.write_bytes(content[: len(content) // 2])
    with pytest.raises(ModelFolderError, match=r"__0_0\.distcp has \d+ bytes and is cut off: .* ends at byte"):
        read_metadata(checkpoint)
    shard.unlink()
    with pytest.raises(ModelFolderError, match=r"__0_0\.distcp is missing"):
        read_metadata(checkpoint)


def grow(metadata: Metadata) -> None:
    entry = metadata.state_dict_metadata[NORM]
    entry.size = torch.Size([2**61])
    entry.chunks = [ChunkStorageMetadata(torch.Size([0]), torch.Size([2**61]))]


FAULTS: dict[str, tuple[Callable[[Metadata], object], str]] = {
    "larger than what is stored": (grow, r"final_layernorm\.weight at \(0,\) needs 4611686018427387904 bytes"),
    "a hole": (
        lambda metadata: setattr(metadata.state_dict_metadata[NORM], "size", torch.Size([7])),
        r"1 pieces of decoder\.final_layernorm\.weight do not make up a tensor \(7,\)",
    ),
    "a piece twice": (
        lambda metadata: metadata.state_dict_metadata[NORM].chunks.extend(metadata.state_dict_metadata[NORM].chunks),
        r"2 pieces of decoder\.final_layernorm\.weight do not make up",
    ),
    "no pieces": (lambda metadata: metadata.state_dict_metadata[NORM].chunks.clear(), "has no pieces"),
    "no place": (
        lambda metadata: metadata.storage_data.clear(),
        r"does not say where the piece of decoder\.final_layernorm\.weight",
    ),
    "no places": (lambda metadata: setattr(metadata, "storage_data", None), "lacks the list of tensors"),
    "a negative start": (lambda metadata: setattr(place(metadata), "offset", -1), "no file, start and length"),
    "a complex dtype": (
        lambda metadata: setattr(metadata.state_dict_metadata[NORM].properties, "dtype", torch.complex64),
        r"asks for torch\.complex64",
    ),
    "an encrypted tensor": (
        lambda metadata: setattr(place(metadata), "transform_descriptors", ["aes"]),
        "stored compressed or encrypted",
    ),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_what_does_not_fit_the_files_is_refused(fault: str, checkpoint: Path):
    change, message = FAULTS[fault]
    edit(checkpoint, change)
    with pytest.raises(ModelFolderError, match=message):
        read_metadata(checkpoint)


@pytest.mark.parametrize(
    ("pickled", "message"),
    [
        (b"", "damaged"),
        (b"\x80\x04N.", "holds no checkpoint metadata"),
        (b"\x80\x04\x8d\xff\xff\xff\xff\xff\xff\xff\x00", r"damaged|BINUNICODE8"),  # 2**56 bytes of text announced
        (b"\x80\x04Nr\xff\xff\xff\x7f.", "holds no checkpoint metadata"),  # memo 2**31: an array in pickle's own reader
        (b"\x80\x02cos\nsystem\nX\x02\x00\x00\x00ls\x85R.", r"asks for os\.system"),
        (b"\x80\x04" + b")" + b"\x85" * 100_000 + b".", "holds no checkpoint metadata"),  # nested deep
        (b"\x80\x04}" + b")" + b"\x85" * 100_000 + b"Ns.", "a tuple is the key"),
        (b"\x80\x02Pstranger\n.", "opcode PERSID"),
    ],
)
def test_a_crafted_pickle_is_one_clear_error(pickled: bytes, message: str, tmp_path: Path):
    (tmp_path / ".metadata").write_bytes(pickled)
    with pytest.raises(ModelFolderError, match=message):
        read_metadata(tmp_path)


# ---------------------------------------------------------------- the tensors themselves


def rewrite_zip(path: Path, change: Callable[[zipfile.ZipInfo, bytes], tuple[int, bytes]]) -> bytes:
    """The one tensor in a file, saved again with each record's compression and bytes changed."""
    out = io.BytesIO()
    with zipfile.ZipFile(path) as archive, zipfile.ZipFile(out, "w") as made:
        for info in archive.infolist():
            compression, content = change(info, archive.read(info))
            made.writestr(info.filename, content, compression)
    return out.getvalue()


def saved(tensor: torch.Tensor, folder: Path) -> StoredTensor:
    path = folder / "one.distcp"
    torch.save(tensor, path)
    chunk = StoredChunk((0,) * tensor.dim(), tuple(tensor.shape), path, 0, path.stat().st_size)
    return StoredTensor(tensor.dtype, tuple(tensor.shape), (chunk,))


def with_content(stored: StoredTensor, content: bytes) -> StoredTensor:
    (chunk,) = stored.chunks
    chunk.file.write_bytes(content)
    return dataclasses.replace(stored, chunks=(dataclasses.replace(chunk, length=len(content)),))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64])
@pytest.mark.parametrize("make", [lambda it: it, torch.Tensor.t, lambda it: it[1:, ::2], lambda it: it[0, 0]])
def test_a_tensor_is_read_as_torch_saved_it(make: Callable[..., torch.Tensor], dtype: torch.dtype, tmp_path: Path):
    tensor = make(torch.arange(15).view(3, 5).to(dtype))
    assert torch.equal(read_tensor(saved(tensor, tmp_path)), tensor)


def test_layers_and_pieces_are_put_together_as_torch_does(tmp_path: Path):
    whole = torch.randn(3, 4, 6, generator=torch.Generator().manual_seed(0))
    chunks = []
    for layers, columns in ((slice(0, 1), 2), (slice(1, 3), 2), (slice(0, 1), 4), (slice(1, 3), 4)):
        part = whole[layers, :, columns - 2 : columns] if columns == 2 else whole[layers, :, 2:]
        path = tmp_path / f"{len(chunks)}.distcp"
        torch.save(part.clone(), path)
        start = 3  # where a tensor begins is not aligned
        path.write_bytes(b"..." + path.read_bytes())
        offsets = (layers.start, 0, columns - 2)
        chunks.append(StoredChunk(offsets, tuple(part.shape), path, start, path.stat().st_size - start))
    stored = StoredTensor(torch.float32, (3, 4, 6), tuple(chunks))
    assert torch.equal(read_tensor(stored), whole)
    assert all(torch.equal(read_tensor(stored, layer), whole[layer]) for layer in range(3))


TENSOR_FAULTS: dict[str, tuple[Callable[[zipfile.ZipInfo, bytes], tuple[int, bytes]], str]] = {
    "compressed": (lambda info, content: (zipfile.ZIP_DEFLATED, content), "are compressed"),
    "cut off": (
        lambda info, content: (0, content[:-4] if info.filename.endswith("data/0") else content),
        r"a tensor of shape \(3, 5\) is larger than its 56 bytes",
    ),
    "code": (
        lambda info, content: (0, pickle.dumps(_Runs(Path("ran"))) if info.filename.endswith(".pkl") else content),
        r"asks for posix\.system",
    ),
    "no tensor": (
        lambda info, content: (0, pickle.dumps({"a": 1}) if info.filename.endswith(".pkl") else content),
        "hold something else than a tensor",
    ),
    "a huge shape": (
        lambda info, content: (0, content.replace(b"K\x03K\x05\x86", b"J\xff\xff\xff\x7fJ\xff\xff\xff\x7f\x86")),
        r"a tensor of shape \(2147483647, 2147483647\) is larger than its 60 bytes",
    ),
    "a huge stride": (
        lambda info, content: (0, content.replace(b"K\x05K\x01\x86", b"J\xff\xff\xff\x7fK\x01\x86")),
        r"a tensor of shape \(3, 5\) is larger than its 60 bytes",
    ),
    "big-endian": (
        lambda info, content: (0, b"big" if info.filename.endswith("byteorder") else content),
        "their values are not little-endian",
    ),
}


@pytest.mark.parametrize("fault", TENSOR_FAULTS)
def test_a_damaged_or_crafted_tensor_is_named_by_its_file(fault: str, tmp_path: Path):
    change, message = TENSOR_FAULTS[fault]
    stored = saved(torch.arange(15.0).view(3, 5), tmp_path)
    content = rewrite_zip(stored.chunks[0].file, change)
    with pytest.raises(ModelFolderError, match=message) as caught:
        read_tensor(with_content(stored, content))
    assert "one.distcp" in str(caught.value)


def test_a_tensor_of_another_dtype_is_refused(tmp_path: Path):
    stored = dataclasses.replace(saved(torch.zeros(4), tmp_path), dtype=torch.int32)
    with pytest.raises(ModelFolderError, match=r"hold a torch\.float32 tensor \(4,\), promised is torch\.int32"):
        read_tensor(stored)


def test_bytes_that_are_no_archive_are_refused(tmp_path: Path):
    stored = saved(torch.zeros(4), tmp_path)
    content = stored.chunks[0].file.read_bytes()
    for damaged in (b"x" * len(content), content[: len(content) // 2], content[::-1]):
        with pytest.raises(ModelFolderError, match=r"hold no whole archive|is missing|not where it should"):
            read_tensor(with_content(stored, damaged))
