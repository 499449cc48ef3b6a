"""Small audio files that a decoder unpacks to a lot of memory or work."""

import struct
import zlib

MATRIX = struct.pack(">9I", 0x10000, 0, 0, 0, 0x10000, 0, 0, 0, 0x40000000)
BLOCK_BYTES = 9_900_000  # of zeros, which are ten kilobytes after compression


def mp4(num_samples: int) -> bytes:
    """Return an MP4 of five kilobytes whose sample table announces a number of samples. FFmpeg builds an
    index of 24 bytes a sample before it reads the first."""
    entries = (
        full_box(b"stts", 0, struct.pack(">III", 1, num_samples, 2)),
        full_box(b"stsc", 0, struct.pack(">IIII", 1, 1, num_samples, 1)),
        full_box(b"stsz", 0, struct.pack(">II", 1, num_samples)),
        full_box(b"stco", 0, struct.pack(">II", 1, 40)),
    )
    return box(b"ftyp", b"isom\0\0\2\0isomiso2mp41") + movie(entries) + box(b"mdat", b"\x55" * 4000)


def fragmented_mp4(num_samples: int) -> bytes:
    """Return the same without a table: a fragment announces the samples."""
    empty = [full_box(name, 0, b"\0" * 4) for name in (b"stts", b"stsc", b"stco")]
    entries = (*empty[:2], full_box(b"stsz", 0, b"\0" * 8), empty[2])
    extends = box(b"mvex", full_box(b"trex", 0, struct.pack(">IIIII", 1, 1, 1, 1, 0)))
    run = full_box(b"trun", 0, struct.pack(">I", num_samples))
    start = full_box(b"tfhd", 0x020000, struct.pack(">I", 1)) + full_box(b"tfdt", 0, b"\0" * 4)
    fragment = box(b"moof", full_box(b"mfhd", 0, struct.pack(">I", 1)), box(b"traf", start, run))
    head = box(b"ftyp", b"iso5\0\0\2\0iso5isom") + movie(entries, extends)
    return head + fragment + box(b"mdat", b"\x55" * 4000)


def movie(entries: tuple[bytes, ...], extends: bytes = b"") -> bytes:
    """Return the description of one A-law track with these tables."""
    sound = box(
        b"alaw", b"\0" * 6 + struct.pack(">H", 1) + b"\0" * 8 + struct.pack(">HHHHI", 1, 8, 0, 0, 16000 << 16)
    )
    table = box(b"stbl", full_box(b"stsd", 0, struct.pack(">I", 1), sound), *entries)
    source = box(b"dinf", full_box(b"dref", 0, struct.pack(">I", 1), full_box(b"url ", 1)))
    media = box(b"minf", full_box(b"smhd", 0, b"\0" * 4), source, table)
    header = full_box(b"mdhd", 0, struct.pack(">IIIIHH", 0, 0, 16000, 16000, 0x55C4, 0))
    handler = full_box(b"hdlr", 0, struct.pack(">I4s", 0, b"soun") + b"\0" * 12 + b"s\0")
    place = struct.pack(">IIIII", 0, 0, 1, 0, 1000) + b"\0" * 8 + struct.pack(">4H", 0, 0, 0x100, 0)
    track = full_box(b"tkhd", 7, place + MATRIX + b"\0" * 8)
    whole = struct.pack(">IIIIIH", 0, 0, 1000, 1000, 0x10000, 0x100) + b"\0" * 10 + MATRIX + b"\0" * 24
    return box(
        b"moov",
        full_box(b"mvhd", 0, whole + struct.pack(">I", 2)),
        box(b"trak", track, box(b"mdia", header, handler, media)),
        extends,
    )


def box(name: bytes, *parts: bytes) -> bytes:
    content = b"".join(parts)
    return struct.pack(">I4s", 8 + len(content), name) + content


def full_box(name: bytes, flags: int, *parts: bytes) -> bytes:
    return box(name, struct.pack(">I", flags), *parts)


def matroska(num_blocks: int) -> bytes:
    """Return two seconds of audio with blocks of another track between them. Each has ten kilobytes, and
    unpacks to ten megabytes."""
    form = element("4286", b"\1") + element("42F7", b"\1") + element("42F2", b"\4") + element("42F3", b"\x08")
    head = element(
        "1A45DFA3", form + element("4282", b"matroska") + element("4287", b"\4") + element("4285", b"\2")
    )
    facts = element("1549A966", element("2AD7B1", (1_000_000).to_bytes(3, "big")) + element("4D80", b"x"))
    tracks = element("1654AE6B", audio_track() + packed_track())
    audio, block = b"\x10\x20" * 16000, zlib.compress(bytes(BLOCK_BYTES), 9)
    clusters = [cluster(0, 1, audio), *(cluster(i + 1, 2, block) for i in range(num_blocks))]
    clusters.append(cluster(num_blocks + 2, 1, audio))
    return head + element("18538067", facts + tracks + b"".join(clusters))


def audio_track() -> bytes:
    sound = element("B5", struct.pack(">d", 16000)) + element("9F", b"\1") + element("6264", b"\x10")
    names = element("83", b"\2") + element("86", b"A_PCM/INT/LIT")
    return element("AE", element("D7", b"\1") + element("73C5", b"\1") + names + element("E1", sound))


def packed_track() -> bytes:
    """Return the entry of a video track whose blocks are compressed with zlib."""
    packing = element("5031", b"\0") + element("5032", b"\1") + element("5033", b"\0")
    packing += element("5034", element("4254", b"\0"))
    names = element("83", b"\1") + element("86", b"V_UNCOMPRESSED")
    size = element("E0", element("B0", b"\x10") + element("BA", b"\x10"))
    number = element("D7", b"\2") + element("73C5", b"\2")
    return element("AE", number + names + size + element("6D80", element("6240", packing)))


def cluster(time: int, track: int, data: bytes) -> bytes:
    stamp = element("E7", time.to_bytes(2, "big"))
    return element("1F43B675", stamp + element("A3", bytes([0x80 | track]) + b"\0\0\x80" + data))


def element(id: str, content: bytes) -> bytes:
    return bytes.fromhex(id) + ((1 << 56) | len(content)).to_bytes(8, "big") + content
