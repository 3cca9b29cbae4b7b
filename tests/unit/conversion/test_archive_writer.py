"""Archives written without torch.save are what torch.load and zipfile take for its own."""

from __future__ import annotations

import io
import zipfile
from pathlib import Path

import pytest
import torch

from exgrpo_conversion import _archive_writer
from exgrpo_conversion._archive_writer import write_tensor
from exgrpo_conversion._torch_archive import TENSOR_NAMES, TorchArchive


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("shape", [(5,), (1, 4, 3), (0, 3), (1, 300, 7)])
def test_torch_and_this_package_read_what_is_written(shape: tuple[int, ...], dtype: torch.dtype, tmp_path: Path):
    tensor = torch.randn(shape, generator=torch.Generator().manual_seed(0)).to(dtype)
    path = tmp_path / "tensors"
    with path.open("xb") as file:
        file.write(b"before")
        length = write_tensor(file, [tensor], shape)
    archive = path.read_bytes()[6:]
    assert len(archive) == length
    loaded = torch.load(io.BytesIO(archive), weights_only=True)
    assert loaded.dtype == dtype
    assert torch.equal(loaded, tensor)
    mine = TorchArchive(path, 6, length)
    saved = mine.tensor(mine.content(TENSOR_NAMES))
    assert torch.equal(saved.read(), tensor)
    assert saved.start % 64 == 0  # so that it can be used where it is mapped


def test_pieces_are_written_one_after_another():
    pieces = [torch.arange(6.0).view(2, 3), torch.arange(3.0).view(1, 3)]
    out = io.BytesIO()
    write_tensor(out, pieces, (1, 3, 3))
    out.seek(0)
    assert torch.load(out).tolist() == [[[0, 1, 2], [3, 4, 5], [0, 1, 2]]]


@pytest.mark.parametrize("limit", [10, 150, 400, 800])
def test_numbers_of_more_than_32_bits_are_written_as_the_zip_format_has_them(
    limit: int, monkeypatch: pytest.MonkeyPatch
):
    """The numbers are small here and the limit is lowered: each threshold makes others of them 'large'."""
    monkeypatch.setattr(_archive_writer, "_LIMIT", limit)
    tensor = torch.arange(60.0)
    out = io.BytesIO()
    write_tensor(out, [tensor], (60,))
    out.seek(0)
    assert torch.equal(torch.load(out, weights_only=True), tensor)
    with zipfile.ZipFile(out) as archive:
        sizes = {info.filename: info.file_size for info in archive.infolist()}
    assert sizes["archive/data/0"] == 240
