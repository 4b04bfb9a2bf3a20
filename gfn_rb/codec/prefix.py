"""The first 64 bytes of frames and files."""

from __future__ import annotations

import struct
from hmac import compare_digest
from typing import NamedTuple

from xxhash import xxh3_64_intdigest

from gfn_rb.codec.secret import Running, Secret, changed
from gfn_rb.errors import SecretError, WireCorruptError, WireVersionError

MAGIC = b"gfn_rb\r\n"
VERSION = 2
FRAME, FILE = b"rows", b"file"  # in capital letters what is summed with a secret

_PREFIX = struct.Struct("<8sHH4sQQQQQQ")
_WORD = struct.Struct("<Q")
_SEED_AT, _SUM_AT, _SUMMED_FROM = 8, 16, 24
PREFIX_NBYTES = _PREFIX.size


class Prefix(NamedTuple):
    """What a frame or file begins with."""

    version: int
    kind: int
    """Of a frame: what it is about."""
    form: bytes
    """Whether it is a frame or a file."""
    sum: int
    """The checksum of the head but for magic and checksum."""
    nbytes: int
    """Of all."""
    head_nbytes: int
    structure_nbytes: int
    meta_nbytes: int
    n_rows: int
    """Of each tensor of a frame."""

    @classmethod
    def read(cls, data: memoryview, name: str) -> Prefix:
        """Return what bytes begin with, unchecked but for the magic.

        Raises:
            WireCorruptError: they are too few, or begin otherwise.
        """
        if len(data) < PREFIX_NBYTES:
            raise WireCorruptError(
                f"{name} has {len(data)} bytes; expected {PREFIX_NBYTES} or more"
            )
        magic, *values = _PREFIX.unpack_from(data)
        if magic != MAGIC:
            raise WireCorruptError(f"{name} begins with {magic!r}; expected {MAGIC!r}")
        return cls._make(values)

    @classmethod
    def checked(
        cls, data: memoryview, name: str, form: bytes, secret: Secret | None = None
    ) -> tuple[Prefix, Running]:
        """Return what bytes begin with, once the head is known to be sound.

        A version that was damaged is so told apart from another one, which is sound. Of neither
        this version nor this form the checksum is not compared: version 1, whose prefix says no
        form, makes it in another way.

        Args:
            data: all that came.
            name: what errors call it.
            form: what it should be.
            secret: the secret that it must have been made with, None for without any.

        Returns:
            The prefix, and what has summed the head with the secret, None without one.

        Raises:
            WireCorruptError: the sizes, the checksum of the head or the form differ.
            WireVersionError: it is of another version.
            SecretError: it was not made with the secret, or with one.
        """
        prefix, running = cls.read(data, name), None
        if form == FRAME:
            name = f"{name} of kind {prefix.kind}"
        is_keyed = prefix.form in (FRAME.upper(), FILE.upper())
        if is_keyed and secret is None:
            raise SecretError(f"{name} was made with a secret, and none is given to read it")
        if secret is not None and not is_keyed:
            raise SecretError(f"{name} was made without the secret that is given to read it")
        if prefix.version == VERSION or prefix.form == form or secret is not None:
            running = prefix._check_head(data, name, secret)
        if prefix.version != VERSION:
            raise WireVersionError(f"{name} is of version {prefix.version}; expected {VERSION}")
        if prefix.form.lower() != form:
            raise WireCorruptError(f"{name} is of form {prefix.form!r}; expected {form!r}")
        return prefix, running

    def _check_head(self, data: memoryview, name: str, secret: Secret | None) -> Running:
        """Compare sizes and checksum; return what has summed the head with the secret."""
        if self.nbytes != len(data):
            raise WireCorruptError(f"{name} has {len(data)} bytes; expected {self.nbytes}")
        if not self.texts_end <= self.head_nbytes <= self.nbytes:
            raise WireCorruptError(
                f"{name} has a head of {self.head_nbytes} bytes with texts up to {self.texts_end}; "
                f"expected it to hold the texts, and to lie within {self.nbytes}"
            )
        head = data[: self.head_nbytes]
        if secret is not None:
            running = _summed(head, secret)
            if not compare_digest(running.digest(), _WORD.pack(self.sum)):
                raise changed(name)
            return running
        if (came := _sum(head)) != self.sum:
            raise WireCorruptError(
                f"the checksum of the head of {name} is {came:016x}; expected {self.sum:016x}"
            )
        return None

    def seal(self, head: memoryview, secret: Secret | None = None) -> Running:
        """Write it to the beginning of a head, with the checksum of all of that.

        Returns:
            What has summed the head with the secret, None without one.
        """
        if secret is None:
            _PREFIX.pack_into(head, 0, MAGIC, *self)
            _WORD.pack_into(head, _SUM_AT, _sum(head))
            return None
        _PREFIX.pack_into(head, 0, MAGIC, *self._replace(form=self.form.upper()))
        running = _summed(head, secret)
        head[_SUM_AT:_SUMMED_FROM] = running.digest()
        return running

    @property
    def meta_at(self) -> int:
        """Where the structure ends and the metadata begins, in bytes."""
        return PREFIX_NBYTES + self.structure_nbytes

    @property
    def texts_end(self) -> int:
        """Where the metadata ends, in bytes."""
        return PREFIX_NBYTES + self.structure_nbytes + self.meta_nbytes


def _sum(head: memoryview) -> int:
    # The seed has version, kind and form in it, so that these are summed as well.
    return xxh3_64_intdigest(head[_SUMMED_FROM:], _WORD.unpack_from(head, _SEED_AT)[0])


def _summed(head: memoryview, secret: Secret) -> Running:
    running = secret.hash()
    running.update(head[_SEED_AT:_SUM_AT])
    running.update(head[_SUMMED_FROM:])
    return running
