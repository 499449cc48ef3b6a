"""The meaning of a file of Python code, for keys that a comment must not change."""

from __future__ import annotations

from functools import cache
from hashlib import blake2b
from pathlib import Path
from types import CodeType


def meaning(source: bytes) -> bytes:
    """Return a hash of what Python code does: of its bytecode, without comments, docstrings, assertions and
    line numbers. Another release of Python may give another hash, and Python 3.13 notes where a class begins."""
    code = compile(source, "", "exec", dont_inherit=True, optimize=2)
    return blake2b(repr(_facts(code)).encode(), digest_size=16).digest()


@cache
def meaning_of(file: Path) -> bytes:
    """Return the hash of a file's meaning, as it was at the first call of this process."""
    return meaning(file.read_bytes())


def _facts(value: object) -> object:
    """Return what `repr` writes the same way in each process: the order of a set differs between processes."""
    if isinstance(value, frozenset):
        return sorted(map(repr, value))
    if not isinstance(value, CodeType):
        return value
    arguments = value.co_argcount, value.co_posonlyargcount, value.co_kwonlyargcount, value.co_flags
    names = value.co_name, value.co_names, value.co_varnames, value.co_freevars, value.co_cellvars
    code = value.co_code, value.co_exceptiontable
    return arguments, names, code, tuple(map(_facts, value.co_consts))
