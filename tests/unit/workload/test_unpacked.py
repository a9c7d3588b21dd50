"""What a packed, a sparse or a growing file makes a reader do is bounded, whatever the file asks for."""

from __future__ import annotations

import gzip
import lzma
import zlib
from pathlib import Path

import pytest

from relaygr_stream.errors import InputError
from relaygr_stream.workload.logfile import TextLog
from relaygr_stream.workload.logs import read_log
from relaygr_stream.workload.unpacked import UNPACK_ERRORS, unpacked

ROW = "u,1,1400327202\n"
LOG = "user,item,time\n" + ROW


def asking_for(data: bytes, dictionary: int) -> bytes:
    """An xz file whose first block asks for another dictionary: 40 is 4 GiB - 1, 28 is 64 MiB (`xz -9`)."""
    length = 4 * (data[12] + 1)
    header = bytearray(data[12 : 12 + length - 4])
    header[header.index(b"\x21\x01") + 2] = dictionary
    return data[:12] + bytes(header) + zlib.crc32(header).to_bytes(4, "little") + data[12 + length :]


def test_the_dictionary_of_xz_is_bounded(tmp_path: Path) -> None:
    path = tmp_path / "log.csv.xz"
    path.write_bytes(asking_for(lzma.compress(LOG.encode()), 28))
    assert len(read_log(path)) == 1
    path.write_bytes(asking_for(lzma.compress(LOG.encode()), 40))
    with pytest.raises(InputError, match="asks for more than 128 MiB to be unpacked; pack it with xz -9 or less"):
        read_log(path)


@pytest.mark.parametrize("pack", [gzip.compress, lzma.compress])
def test_packed_streams_behind_one_another_are_one_file(tmp_path: Path, pack: type[bytes]) -> None:
    path = tmp_path / "log.packed"
    rows = [f"{'u' * 200},{item},1400327202\n" for item in range(5_000)]  # more than a chunk
    parts = [pack(text.encode()) for text in ("user,item,time\n", "".join(rows), "".join(rows))]
    path.write_bytes(parts[0] + parts[1] + b"\0" * 8 + parts[2])
    assert len(read_log(path)) == 10_000


@pytest.mark.parametrize("cut", [1, 20, 60])
def test_a_cut_file_is_an_error_of_its_kind(tmp_path: Path, cut: int) -> None:
    path = tmp_path / "log.xz"
    path.write_bytes(lzma.compress(b"".join(zlib.crc32(bytes([n % 256])).to_bytes(4, "big") for n in range(9)))[:-cut])
    with path.open("rb") as raw, pytest.raises(UNPACK_ERRORS):
        unpacked(raw).read()


def test_a_sparse_file_is_read_as_far_as_its_blocks_allow(tmp_path: Path) -> None:
    path = tmp_path / "log.csv"
    path.write_text(LOG * 10_000)
    with path.open("r+b") as file:
        file.truncate(1 << 40)
    with pytest.raises(InputError, match="on the disk unpack to more than"):
        read_log(path)


def test_what_is_appended_while_a_file_is_read_does_not_keep_the_reader(tmp_path: Path) -> None:
    path = tmp_path / "log.csv"
    path.write_text(LOG)
    with TextLog(path) as log, path.open("a") as writer:
        for count, _ in enumerate(log):
            writer.write(ROW)
            writer.flush()
            assert count < 2, "the reader follows its writer"
