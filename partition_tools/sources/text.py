"""Text files of rows and columns: ``.csv``, ``.tsv``, ``.txt`` and their like, packed by gzip or not.

Lines that begin with ``#`` or ``%`` are comments; blank lines mean nothing. Columns are separated as the first row
separates them: by tabs, else semicolons, else commas, else runs of blanks. Every row has the same number of columns;
one that has not is an error with its line number. A byte order mark and any line ends are taken.

Numbers are parsed by ``numpy.loadtxt``: its C parser reads 3 to 6 million values a second on one core, and a data frame
library, two or three times as fast, would be a dependency for the sake of a step that is taken once a graph.
"""

from __future__ import annotations

import contextlib
import csv
import gzip
import io
import itertools
import re
import warnings
import zlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, NoReturn

import numpy as np
from numpy.typing import NDArray

from partition_tools.graph import Array

_SKIPPED = re.compile(rb"^[ \t]*(?:[#%][^\n]*)?(?:\n|\Z)", re.MULTILINE)
_BLOCK = 1 << 20
"""Bytes looked at in one go: few enough that what is computed of them stays in the cache."""
_PIECE = 1 << 24
_FREELY_UNPACKED = 1 << 26
_MOST_UNPACKED = 256
"""Bytes that one packed byte may become in a text beyond _FREELY_UNPACKED bytes; tables of numbers stay below 50."""
_SPARE = 1 << 28
_CONTROLS = bytes(code for code in range(32) if code not in b"\t\n\r")
_DELIMITERS = (b"\t", b";", b",")


def unpacked(path: str) -> bytes:
    """The file's bytes, after gunzip where they begin like a gzip file. Raises ``ValueError`` for a damaged one."""
    with open(path, "rb") as stream:
        packed = stream.read()
    if not packed.startswith(b"\x1f\x8b"):
        return packed
    most = max(_FREELY_UNPACKED, _MOST_UNPACKED * len(packed))
    blocks, size = [], 0
    try:
        with gzip.GzipFile(fileobj=io.BytesIO(packed)) as archive:
            while block := archive.read(_BLOCK):
                blocks.append(block)
                size += len(block)
                if size > most:
                    raise ValueError(
                        f"{path}: {len(packed)} packed bytes become more than {most} bytes; if that is right, unpack "
                        f"it (gunzip) and name the unpacked file"
                    )
    except (EOFError, gzip.BadGzipFile, zlib.error) as error:
        raise ValueError(f"{path}: not a whole gzip file ({error}); copy it again") from error
    return b"".join(blocks)


@dataclass(frozen=True, kw_only=True, eq=False)
class Text:
    """Rows of a text file."""

    path: str
    head: bytes
    """How the file begins, comments included."""
    body: bytes
    """Rows of data, without comments, blank lines and header; ends in a line feed."""
    comments: int
    """Lines left out that are not blank."""
    delimiter: str | None
    """None for runs of blanks."""
    header: tuple[str, ...] | None = None
    first_row: int = 0
    """Number in the file of the first row of data, of a text that is a piece of it."""
    columns: int | None = None
    """Columns of the first row of the file, of a text that is a piece of it."""

    @classmethod
    def read(cls, path: str) -> Text:
        return cls.of(path, unpacked(path))

    @classmethod
    def first_of(cls, path: str, size: int) -> Text:
        """The first piece of a long file, of about ``size`` bytes."""
        return cls.of(path, next(_pieces(path, size), b""))

    def all_of(self, size: int) -> Iterator[Text]:
        """This first piece of a file, and then all others, of about ``size`` bytes each."""
        yield self
        row = self.num_rows
        for raw in itertools.islice(_pieces(self.path, size), 1, None):
            piece = replace(
                Text.of(self.path, raw), delimiter=self.delimiter, first_row=row, columns=self.width, header=self.header
            )
            row += piece.num_rows
            yield piece

    @classmethod
    def of(cls, path: str, raw: bytes) -> Text:
        if raw.startswith((b"\xff\xfe", b"\xfe\xff")):
            raise ValueError(f"{path}: the text is UTF-16; save it as UTF-8")
        if len(raw.translate(None, _CONTROLS)) != len(raw):
            raise ValueError(f"{path}: holds control characters (zero bytes or the like), so it is no text of rows")
        raw = _plain_line_ends(raw)
        body, comments = _without_comments(raw)
        first = body[: body.find(b"\n")]
        delimiter = next((mark.decode() for mark in _DELIMITERS if mark in first), None)
        return cls(path=path, head=raw[:4096], body=body, comments=comments, delimiter=delimiter)

    @cached_property
    def quoted(self) -> bool:
        return b'"' in self.body

    def row(self, index: int) -> tuple[str, ...] | None:
        """The fields of a row near the top, or None where there are not as many."""
        start = 0
        for _ in range(index):
            start = self.body.find(b"\n", start) + 1
        end = self.body.find(b"\n", start)
        return None if end < 0 else self._fields(self.body[start:end])

    @cached_property
    def width(self) -> int:
        """Columns of the first row of data, or of the header where there is none."""
        return self.columns or len(self.row(0) or self.header or ())

    def with_header(self) -> Text:
        """The same file with its first row as header."""
        names = self.row(0)
        assert names is not None
        return replace(self, header=names, body=self.body[self.body.find(b"\n") + 1 :])

    def _fields(self, line: bytes) -> tuple[str, ...]:
        text = line.decode("utf-8", "replace")
        if not self.quoted:
            return tuple(field.strip() for field in text.split(self.delimiter))
        # csv takes one blank for a separator, loadtxt a run of them
        mark, text = (" ", " ".join(text.split())) if self.delimiter is None else (self.delimiter, text)
        try:
            return tuple(field.strip() for field in next(csv.reader([text], delimiter=mark), []))
        except csv.Error as error:
            raise ValueError(f"{self.path}: {error}; shorten it") from error

    # ------------------------------------------------------------------------------------------------------ parsing

    def check_width(self) -> None:
        """Raise ``ValueError`` for the first row that has more or fewer columns than the first, or than the header."""
        if self.num_rows and self.header is not None and len(self.header) != self.width:
            self.fail(0, f"{self.width} columns under {len(self.header)} names ({', '.join(self.header)[:60]})")
        if self.num_rows and self.quoted:
            _ = self._quoted_fields

    @cached_property
    def num_rows(self) -> int:
        """Rows of data, each of which has ``width`` columns; ``ValueError`` for the first that has not."""
        rows = 0
        for block in _blocks(self.body):
            counts = self._columns(block)
            if counts is not None and (counts != self.width).any():
                bad = int(np.argmax(counts != self.width))
                self._ragged(rows + bad, int(counts[bad]))
            rows += block.count(b"\n")
        return rows

    def _columns(self, block: bytes) -> NDArray[np.int64] | None:
        """Columns of each line, unless only a parser that knows quotes can tell."""
        if self.quoted:
            return None
        data = np.frombuffer(block, np.uint8)
        ends = np.flatnonzero(data == ord("\n"))
        if self.delimiter is not None:
            marks = np.flatnonzero(data == ord(self.delimiter))
            return np.diff(np.searchsorted(marks, ends), prepend=0) + 1
        blank = (data == ord(" ")) | (data == ord("\t")) | (data == ord("\n"))
        begins = np.flatnonzero(~blank & np.concatenate(([True], blank[:-1])))
        return np.diff(np.searchsorted(begins, ends), prepend=0)

    def parse(self, dtype: Any, columns: Sequence[int] | None = None) -> Array:
        """[M, C] values of the columns (all by default) in one dtype; ``ValueError`` with line and field.

        ``dtype`` is int64 (whole numbers only), a float type, or str.
        """
        places = list(range(self.width)) if columns is None else list(columns)
        if self.num_rows == 0:
            return np.empty((0, len(places)), "U1" if dtype is str else dtype)
        try:
            if not self.quoted:
                return self._loadtxt(dtype, places)
            fields = self._quoted_fields[:, places]
            if dtype is not str and (np.strings.find(fields, "_") >= 0).any():  # Python takes 1_0 for a number
                raise ValueError("an underscore")
            return fields.astype(dtype)
        except (ValueError, OverflowError, Warning) as error:
            self._explain(dtype, places, error)

    def _loadtxt(self, dtype: Any, places: list[int] | None) -> Array:
        if dtype is str:
            self._check_names()
        with warnings.catch_warnings():
            warnings.simplefilter("error")  # numpy only warns of 1.5 where whole numbers are asked for
            return np.loadtxt(
                io.BytesIO(self.body),
                dtype=dtype,
                delimiter=self.delimiter,
                usecols=places,
                comments=None,
                quotechar='"' if self.quoted else None,
                ndmin=2,
                encoding="utf-8",
            )

    @cached_property
    def _quoted_fields(self) -> Array:
        """[M, C] text. All columns are read, because numpy compares their number only then."""
        try:
            fields = self._loadtxt(str, None)
            if fields.shape[1] != self.width:  # it leaves out an empty field at the end
                raise ValueError(f"{self.width} columns, some of them empty; expected something in each")
            return fields
        except ValueError as error:
            self._explain(str, range(self.width), error)

    def _check_names(self) -> None:
        """Text is kept in fields of one length, that of the longest."""
        longest = max(len(line) for block in _blocks(self.body) for line in _longest(block))
        if 4 * longest * self.num_rows > _SPARE + 64 * len(self.body):
            self.fail(
                self._find(lambda fields, line: len(line) == longest),
                f"a line of {longest} bytes among {self.num_rows} rows, most of them much shorter; shorten it",
            )

    def _explain(self, dtype: Any, columns: Sequence[int], error: Exception) -> NoReturn:
        """Raise for the first row that does not fit; slow, and needed once at most."""
        kind = "a whole number" if dtype is np.int64 else "UTF-8" if dtype is str else "a number"

        def wrong(fields: tuple[str, ...]) -> str | None:
            return next((f for f in (fields[c] for c in columns) if not _fits(f, dtype)), None)

        row = self._find(lambda fields, line: len(fields) != self.width or wrong(fields) is not None)
        fields = self._row_fields(row)
        if row < 0 or fields is None:
            raise ValueError(f"{self.path}: {error}") from error
        if len(fields) != self.width:
            self._ragged(row, len(fields))
        self.fail(row, f"{(wrong(fields) or '')[:40]!r} is not {kind}{_too_large(wrong(fields), dtype)}")

    def _find(self, matches: Callable[[tuple[str, ...], bytes], bool]) -> int:
        """The first row that matches, or -1."""
        lines = self.body.split(b"\n")[:-1]
        return next((row for row, line in enumerate(lines) if matches(self._fields(line), line)), -1)

    def _row_fields(self, row: int) -> tuple[str, ...] | None:
        return self._fields(self.body.split(b"\n", row + 1)[row]) if row >= 0 else None

    # ------------------------------------------------------------------------------------------------------- errors

    def line(self, row: int) -> int:
        """Number, from 1, of the file's line that holds a row of data."""
        lines = (line for piece in _pieces(self.path, _PIECE) for line in piece.removesuffix(b"\n").split(b"\n"))
        kept = (n for n, line in enumerate(lines, 1) if not _SKIPPED.fullmatch(line))
        index = self.first_row + row + (self.header is not None)
        return next(number for place, number in enumerate(kept) if place == index)

    def blank_inside(self) -> int | None:
        """Number of the first blank line between two rows or below the header, or None."""
        text = _plain_line_ends(unpacked(self.path))
        row, comment, skipped = rb"^(?![ \t]*(?:[#%\n]|\Z)).*\n", rb"(?:[ \t]*[#%].*\n)*", rb"(?:[ \t]*(?:[#%].*)?\n)*"
        found = re.search(row + comment + rb"()[ \t]*\n" + skipped + rb"[ \t]*[^\s#%]", text, re.MULTILINE)
        return None if found is None else text.count(b"\n", 0, found.start(1)) + 1

    def fail(self, row: int, problem: str) -> NoReturn:
        raise ValueError(f"{self.path}, line {self.line(row)}: {problem}")

    def _ragged(self, row: int, columns: int) -> NoReturn:
        mark = {None: "blanks", "\t": "tabs", ",": "commas", ";": "semicolons"}[self.delimiter]
        self.fail(
            row,
            f"{columns} column{'s' * (columns != 1)}, but the first row has {self.width} (separated by {mark}); every "
            f"row needs as many",
        )


def _pieces(path: str, size: int) -> Iterator[bytes]:
    """The file's lines with plain ends, about ``size`` bytes at a time, after gunzip. The last may end without one."""
    with open(path, "rb") as packed:
        zipped = packed.read(2) == b"\x1f\x8b"
        packed.seek(0)
        try:
            with gzip.GzipFile(fileobj=packed) if zipped else contextlib.nullcontext(packed) as stream:
                while raw := stream.read(size):
                    yield _plain_line_ends(raw + stream.readline())
        except (EOFError, gzip.BadGzipFile, zlib.error) as error:
            raise ValueError(f"{path}: not a whole gzip file ({error}); copy it again") from error


def _plain_line_ends(raw: bytes) -> bytes:
    raw = raw.removeprefix(b"\xef\xbb\xbf")
    return raw.replace(b"\r\n", b"\n").replace(b"\r", b"\n") if b"\r" in raw else raw


def _without_comments(raw: bytes) -> tuple[bytes, int]:
    """The text without comments and blank lines, ending in a line feed; and the number of comments."""
    start, skipped = 0, []
    while (line := _SKIPPED.match(raw, start)) is not None and line[0]:
        skipped.append(line[0])
        start = line.end()
    rest = raw[start:]
    # Most files have comments at their head only, and a search for bytes is faster than a look at every line.
    if any(mark in rest for mark in (b"#", b"%", b"\n\n", b"\n ", b"\n\t")):
        skipped += _SKIPPED.findall(rest)
        rest = _SKIPPED.sub(b"", rest)
    if rest and not rest.endswith(b"\n"):
        rest += b"\n"
    return rest, sum(bool(line.strip()) for line in skipped)


def leading_zero(text: bytes, delimiter: str | None) -> bool:
    """Whether some field begins with 0 and has another digit after it."""
    for block in _blocks(text):
        data = np.frombuffer(b"\n" + block, np.uint8)
        before = (data <= ord(" ")) | (data == ord(delimiter or " ")) | (data == ord('"'))
        digit = (data >= ord("0")) & (data <= ord("9"))
        if (before[:-2] & (data[1:-1] == ord("0")) & digit[2:]).any():
            return True
    return False


def _blocks(text: bytes) -> Iterator[bytes]:
    """Whole lines, about _BLOCK bytes at a time."""
    start = 0
    while start < len(text):
        end = text.find(b"\n", min(start + _BLOCK, len(text) - 1)) + 1
        yield text[start:end]
        start = end


def _longest(block: bytes) -> list[bytes]:
    """The longest line of a block, as a list of one."""
    ends = np.flatnonzero(np.frombuffer(block, np.uint8) == ord("\n"))
    lengths = np.diff(ends, prepend=-1) - 1
    last = int(np.argmax(lengths))
    return [block[int(ends[last]) - int(lengths[last]) : int(ends[last])]]


def _fits(text: str, dtype: Any) -> bool:
    if dtype is str:
        return "�" not in text
    try:
        return abs(int(text)) < 2**63 and "_" not in text if dtype is np.int64 else bool(float(text)) in (True, False)
    except ValueError:
        return False


def _too_large(text: str | None, dtype: Any) -> str:
    return " of 64 bits" if dtype is np.int64 and text and re.fullmatch(r"[+-]?[0-9]+", text) else ""
