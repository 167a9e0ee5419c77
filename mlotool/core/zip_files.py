"""Zip files of anybody's, opened within limits on what they list and on what they unpack to."""

import struct
import zipfile
from typing import Any, BinaryIO


def open_zip(file: BinaryIO, max_list_bytes: int) -> zipfile.ZipFile:
    """Open a zip file for reading.

    What a member unpacks to is never more than its `file_size` says: zipfile stops there.

    Args:
        file: the open file.
        max_list_bytes: of its list of members, of which Python makes an object each as soon as it is opened.

    Raises:
        zipfile.BadZipFile: it is none, or lists more.
    """
    # The one that zipfile itself uses: another parser might find another list in the same bytes.
    record = zipfile._EndRecData(file)  # type: ignore[attr-defined]
    if record is None:
        raise zipfile.BadZipFile("it is no zip file")
    list_bytes = record[zipfile._ECD_SIZE]  # type: ignore[attr-defined]
    if list_bytes > max_list_bytes:
        raise zipfile.BadZipFile(f"its list of members has {list_bytes} bytes, and at most {max_list_bytes} are read")
    if _end(file, record) != (record[zipfile._ECD_LOCATION], b""):  # type: ignore[attr-defined]
        raise zipfile.BadZipFile("its list of members is not where its end says, or has a comment behind it")
    return zipfile.ZipFile(file)


def _end(file: BinaryIO, record: Any) -> tuple[int, bytes]:
    """Return where the list of members ends as the file has it, and its comment: parsers differ where they are odd."""
    end = record[zipfile._ECD_OFFSET] + record[zipfile._ECD_SIZE]  # type: ignore[attr-defined]
    if record[zipfile._ECD_SIGNATURE] == zipfile.stringEndArchive64:  # type: ignore[attr-defined]
        file.seek(end + zipfile.sizeEndCentDir64)  # type: ignore[attr-defined]
        locator = file.read(zipfile.sizeEndCentDir64Locator)  # type: ignore[attr-defined]
        if len(locator) < 20 or struct.unpack("<4sLQL", locator)[2] != end:
            return -1, b""
        end += zipfile.sizeEndCentDir64 + zipfile.sizeEndCentDir64Locator  # type: ignore[attr-defined]
    return end, record[zipfile._ECD_COMMENT]  # type: ignore[attr-defined]


def check_members(archive: zipfile.ZipFile, num_bytes: int) -> None:
    """Read all members, and compare their checksums; they are stored as they are, not compressed.

    Args:
        archive: the open file.
        num_bytes: of the whole file: what its members claim in all cannot be more.

    Raises:
        zipfile.BadZipFile: a member is compressed, claims more than there is, or has another checksum.
    """
    members = archive.infolist()
    if any(each.compress_type != zipfile.ZIP_STORED for each in members):
        raise zipfile.BadZipFile("its members are compressed, which a checkpoint's are not")
    if sum(each.file_size for each in members) > num_bytes or len({each.filename for each in members}) < len(members):
        raise zipfile.BadZipFile("its members claim more than the file holds")
    torn = archive.testzip()
    if torn:
        raise zipfile.BadZipFile(f"its part {torn} has another checksum than when it was written")
